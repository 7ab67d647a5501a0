/* The loops once more, for x86 processors with AVX2, as most have it since 2013: setup.py has them compiled so. */

#define MODULE avx2
#include "compiled.c"
