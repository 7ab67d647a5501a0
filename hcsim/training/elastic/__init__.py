"""Training that goes on while members come and go.

ElasticMember       what `follow` leads from view to view, with its task, settings, model and run, as a `Trainer`
ReplicatedMember    one that holds a replica of the model
ServedMember        one that works for a parameter server, as a `Participant`; `Keeper` has what the server knows
Votes               how the members of a view agree that a step counts
Provenance, Era     how far a model has come, and in which views; a `Header` is what of it all others are told
Parcel              state on its way from member to member, and as it is saved
Checkpoints         when and where a member saves
Recovery            how long failures keep a member from training, and whether steps take as long as usual
"""
