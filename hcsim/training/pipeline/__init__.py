"""Pipeline parallelism: a model cut into stages, through which a batch goes in microbatches."""
