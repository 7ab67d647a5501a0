/* The loops once more, for x86 processors of 2013 and later: setup.py has them compiled with AVX2. */

#define MODULE avx2
#include "compiled.c"
