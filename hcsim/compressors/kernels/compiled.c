/* The loops as Python calls them: arrays come as buffers, and sizes are compared before anything is touched.
   Other threads may run meanwhile. What each function does is said in plain.py. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "loops.h"
#include "choice.h"
#include "products.h"

#define FUNCTION(name) static PyObject *py_##name(PyObject *Py_UNUSED(module), PyObject *args)
#define ARRAYS(number) Py_buffer array[number] = {{0}}
#define WITHOUT_LOCK(work) do { Py_BEGIN_ALLOW_THREADS work; Py_END_ALLOW_THREADS } while (0)

static int finished(Py_buffer *array, int number, int fit)
{
    while (number--) PyBuffer_Release(&array[number]);
    if (!fit) PyErr_SetString(PyExc_ValueError, "the arrays' sizes do not fit each other");
    return fit;
}

static PyObject *each(PyObject *args, uint32_t (*loop)(const byte *, byte *, count), count in_bytes, count out_bytes,
                      uint32_t limit)
{
    ARRAYS(2);
    uint32_t most = 0;
    if (!PyArg_ParseTuple(args, "y*w*", &array[0], &array[1])) return NULL;
    count n = array[0].len / in_bytes;
    int fit = array[0].len == n * in_bytes && array[1].len == n * out_bytes;
    if (fit) WITHOUT_LOCK(most = loop(array[0].buf, array[1].buf, n));
    return finished(array, 2, fit) ? PyBool_FromLong(most < limit) : NULL;
}

FUNCTION(copy) { return each(args, copy, 4, 4, INFINITE); }
FUNCTION(to_bf16) { return each(args, to_bf16, 4, 2, 0x7F7F8000u); }
FUNCTION(from_bf16) { return each(args, from_bf16, 2, 4, INFINITE); }
FUNCTION(to_fp16) { return each(args, to_fp16, 4, 2, 0x477FF000u); }
FUNCTION(from_fp16) { return each(args, from_fp16, 2, 4, 0x7C00u); }
FUNCTION(split) { return each(args, split, 4, 4, INFINITE); }
FUNCTION(join) { return each(args, join, 4, 4, INFINITE); }

static int one_for_each_block(const Py_buffer *factors, count n, count block)
{
    return block > 0 && factors->len == 4 * (n / block + (n % block != 0));
}

FUNCTION(largest)
{
    ARRAYS(2);
    count block;
    if (!PyArg_ParseTuple(args, "y*w*n", &array[0], &array[1], &block)) return NULL;
    count n = array[0].len / 4;
    int fit = array[0].len == 4 * n && one_for_each_block(&array[1], n, block);
    if (fit) WITHOUT_LOCK(largest(array[0].buf, array[1].buf, n, block));
    return finished(array, 2, fit) ? Py_NewRef(Py_None) : NULL;
}

static PyObject *scaled(PyObject *args, void (*loop)(const byte *, const byte *, byte *, count, count), count in_bytes,
                        count out_bytes)
{
    ARRAYS(3);
    count block;
    if (!PyArg_ParseTuple(args, "y*y*w*n", &array[0], &array[1], &array[2], &block)) return NULL;
    count n = array[0].len / in_bytes;
    int fit = array[0].len == n * in_bytes && array[2].len == n * out_bytes && one_for_each_block(&array[1], n, block);
    if (fit) WITHOUT_LOCK(loop(array[0].buf, array[1].buf, array[2].buf, n, block));
    return finished(array, 3, fit) ? Py_NewRef(Py_None) : NULL;
}

FUNCTION(quantise) { return scaled(args, quantise, 4, 1); }
FUNCTION(dequantise) { return scaled(args, dequantise, 1, 4); }

FUNCTION(quantise_at_random)
{
    ARRAYS(4);
    count block;
    if (!PyArg_ParseTuple(args, "y*y*y*w*n", &array[0], &array[1], &array[2], &array[3], &block)) return NULL;
    count n = array[3].len;
    int fit = array[0].len == 4 * n && array[2].len == 2 * n && one_for_each_block(&array[1], n, block);
    if (fit) WITHOUT_LOCK(quantise_at_random(array[0].buf, array[1].buf, array[2].buf, array[3].buf, n, block));
    return finished(array, 4, fit) ? Py_NewRef(Py_None) : NULL;
}

FUNCTION(pack_signs)
{
    ARRAYS(2);
    float sum = 0;
    if (!PyArg_ParseTuple(args, "y*w*", &array[0], &array[1])) return NULL;
    count n = array[0].len / 4;
    int fit = array[0].len == 4 * n && array[1].len == n / 8 + (n % 8 != 0);
    if (fit) WITHOUT_LOCK(pack(array[0].buf, array[1].buf, n); sum = sum_of_magnitudes(array[0].buf, n));
    return finished(array, 2, fit) ? PyFloat_FromDouble(sum) : NULL;
}

FUNCTION(unpack_signs)
{
    ARRAYS(3);
    if (!PyArg_ParseTuple(args, "y*y*w*", &array[0], &array[1], &array[2])) return NULL;
    count n = array[2].len / 4;
    int fit = array[2].len == 4 * n && array[0].len == n / 8 + (n % 8 != 0) && array[1].len == 256 * 8 * 4;
    if (fit) WITHOUT_LOCK(unpack(array[0].buf, array[1].buf, array[2].buf, n));
    return finished(array, 3, fit) ? Py_NewRef(Py_None) : NULL;
}

FUNCTION(reaching)
{
    ARRAYS(3);
    unsigned least;
    count found = 0;
    if (!PyArg_ParseTuple(args, "y*Iw*w*", &array[0], &least, &array[1], &array[2])) return NULL;
    count n = array[0].len / 4, room = array[1].len / 4;
    int fit = array[0].len == 4 * n && array[1].len == 4 * room && array[2].len == 4 * room && n <= UINT32_MAX;
    if (fit) WITHOUT_LOCK(found = find(array[0].buf, n, least, array[1].buf, array[2].buf, room));
    return finished(array, 3, fit) ? PyLong_FromSsize_t(found) : NULL;
}

FUNCTION(scatter)
{
    ARRAYS(3);
    if (!PyArg_ParseTuple(args, "y*y*w*", &array[0], &array[1], &array[2])) return NULL;
    count chosen = array[0].len / 8, n = array[2].len / 4, put_there = 0;
    int fit = array[0].len == 8 * chosen && array[1].len == 4 * chosen && array[2].len == 4 * n;
    if (fit) WITHOUT_LOCK(put_there = put(array[0].buf, array[1].buf, chosen, array[2].buf, n));
    return finished(array, 3, fit && put_there == chosen) ? Py_NewRef(Py_None) : NULL;
}

FUNCTION(choose)
{
    ARRAYS(3);
    count n, population;
    if (!PyArg_ParseTuple(args, "w*nnw*w*", &array[0], &n, &population, &array[1], &array[2])) return NULL;
    int fit = array[0].len == 4 * 8 && n >= 0 && n <= population
        && array[1].len == 8 * (population / 64 + (population % 64 != 0));
    if (fit && population > 0)
        WITHOUT_LOCK(choose(array[0].buf, n, population, array[1].buf, array[2].buf, array[2].len / 4));
    return finished(array, 3, fit) ? Py_NewRef(Py_None) : NULL;
}

FUNCTION(marked)
{
    ARRAYS(2);
    if (!PyArg_ParseTuple(args, "y*w*", &array[0], &array[1])) return NULL;
    count words = array[0].len / 8, room = array[1].len / 8, found = 0;
    int fit = array[0].len == 8 * words && array[1].len == 8 * room;
    if (fit) WITHOUT_LOCK(found = list(array[0].buf, words, array[1].buf, room));
    return finished(array, 2, fit && found == room) ? Py_NewRef(Py_None) : NULL;
}

FUNCTION(take_marked)
{
    ARRAYS(3);
    float factor;
    uint32_t most = 0;
    if (!PyArg_ParseTuple(args, "y*y*fw*", &array[0], &array[1], &factor, &array[2])) return NULL;
    count n = array[0].len / 4, room = array[2].len / 4;
    int fit = array[0].len == 4 * n && array[1].len == 8 * (n / 64 + (n % 64 != 0)) && array[2].len == 4 * room;
    if (fit) WITHOUT_LOCK(most = take(array[0].buf, n, array[1].buf, factor, array[2].buf, room));
    return finished(array, 3, fit) ? PyFloat_FromDouble(as_float(most)) : NULL;
}

FUNCTION(choose_few)
{
    ARRAYS(2);
    count n, population;
    int done = 0;
    if (!PyArg_ParseTuple(args, "w*nnw*", &array[0], &n, &population, &array[1])) return NULL;
    int fit = array[0].len == 4 * 8 && n >= 0 && n <= population && population <= (count)FEW_PIECES << FEW_BITS
        && array[1].len % 4 == 0 && array[1].len / 4 >= n;
    if (fit && n > 0) WITHOUT_LOCK(done = choose_few(array[0].buf, n, population, array[1].buf, array[1].len / 4));
    return finished(array, 2, fit) ? PyBool_FromLong(done || n == 0) : NULL;
}

FUNCTION(take_listed)
{
    ARRAYS(3);
    float factor;
    uint32_t most = 0;
    if (!PyArg_ParseTuple(args, "y*y*fw*", &array[0], &array[1], &factor, &array[2])) return NULL;
    count n = array[0].len / 4, chosen = array[1].len / 4;
    int fit = array[0].len == 4 * n && array[1].len == 4 * chosen && array[2].len == 4 * chosen;
    if (fit) WITHOUT_LOCK(most = take_listed(array[0].buf, n, array[1].buf, chosen, factor, array[2].buf));
    return finished(array, 3, fit && most != BEYOND) ? PyFloat_FromDouble(as_float(most)) : NULL;
}

static int is_matrix(const Py_buffer *array, count rows, count columns)
{
    if (rows == 0 || columns == 0) return array->len == 0;
    return array->len % (4 * rows) == 0 && array->len / (4 * rows) == columns;
}

static PyObject *product(PyObject *args, void (*loop)(const byte *, const byte *, byte *, count, count, count),
                         int over_rows)
{
    ARRAYS(3);
    count rank, rows = 0, columns = 0;
    if (!PyArg_ParseTuple(args, "y*y*w*n", &array[0], &array[1], &array[2], &rank)) return NULL;
    int fit = rank > 0;
    if (fit) {
        rows = array[over_rows ? 0 : 2].len / 4 / rank, columns = array[over_rows ? 2 : 0].len / 4 / rank;
        fit = is_matrix(&array[0], rank, over_rows ? rows : columns) && is_matrix(&array[1], rows, columns)
            && is_matrix(&array[2], rank, over_rows ? columns : rows);
    }
    if (fit) WITHOUT_LOCK(loop(array[0].buf, array[1].buf, array[2].buf, rank, rows, columns));
    return finished(array, 3, fit) ? Py_NewRef(Py_None) : NULL;
}

FUNCTION(dots) { return product(args, dots, 0); }
FUNCTION(sums) { return product(args, sums, 1); }

FUNCTION(outer)
{
    ARRAYS(3);
    count rank, rows = 0, columns = 0;
    int sign;
    if (!PyArg_ParseTuple(args, "y*y*w*ni", &array[0], &array[1], &array[2], &rank, &sign)) return NULL;
    int fit = rank > 0;
    if (fit) {
        rows = array[0].len / 4 / rank, columns = array[1].len / 4 / rank;
        fit = is_matrix(&array[0], rank, rows) && is_matrix(&array[1], rank, columns)
            && is_matrix(&array[2], rows, columns);
    }
    if (fit) WITHOUT_LOCK(outer(array[0].buf, array[1].buf, array[2].buf, rank, rows, columns, sign));
    return finished(array, 3, fit) ? Py_NewRef(Py_None) : NULL;
}

#define METHOD(name) {#name, py_##name, METH_VARARGS, NULL}
static PyMethodDef methods[] = {
    METHOD(copy), METHOD(to_bf16), METHOD(from_bf16), METHOD(to_fp16), METHOD(from_fp16), METHOD(split), METHOD(join),
    METHOD(largest), METHOD(quantise), METHOD(dequantise), METHOD(quantise_at_random), METHOD(pack_signs),
    METHOD(unpack_signs), METHOD(reaching), METHOD(scatter), METHOD(choose), METHOD(marked), METHOD(take_marked),
    METHOD(choose_few), METHOD(take_listed),
    METHOD(dots), METHOD(sums), METHOD(outer), {NULL, NULL, 0, NULL},
};

#ifndef MODULE
#define MODULE compiled
#endif
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define INIT_OF(name) PyInit_##name
#define INIT(name) INIT_OF(name)

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = TEXT(MODULE), .m_size = 0, .m_methods = methods};

#if defined(__AVX2__)
#include <cpuid.h>

/* What setup.py had it compiled with. Not every compiler can be asked for F16C by its name. */
static int can_run(void)
{
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")
        && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#else
static int can_run(void) { return 1; }
#endif

PyMODINIT_FUNC INIT(MODULE)(void)
{
    if (can_run()) return PyModuleDef_Init(&definition);
    PyErr_SetString(PyExc_ImportError, "this processor has no AVX2");
    return NULL;
}
