/* What comes from a socket is added to an array piece by piece, while each piece is in the processor's cache. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "sums.h"

#define PIECE_BYTES ((size_t)128 * 1024)

/* Take what is there, at most `most` bytes of it. A piece that has not come whole waits at the room's start. Returns how
   much has come now; sets `error`, to 0 where nothing is wrong, and to -1 where nothing will come any more. */
static size_t receive(int fd, char *room, char *into, size_t total, const Numbers *as, size_t before, size_t most,
                      int *error)
{
    size_t have = before;
    *error = 0;
    while (have < total && have - before < most) {
        size_t begun = have % PIECE_BYTES, left = total - have;
        ssize_t count = recv(fd, room + begun, left < PIECE_BYTES - begun ? left : PIECE_BYTES - begun, 0);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            if (count == 0) *error = -1;
            else if (errno != EAGAIN && errno != EWOULDBLOCK) *error = errno;
            break;
        }
        have += (size_t)count;
        if (have % PIECE_BYTES == 0 || have == total) {
            size_t start = (have - 1) / PIECE_BYTES * PIECE_BYTES;
            as->add(into + start, room, have - start);
        }
    }
    return have - before;
}

static PyObject *receive_sum(PyObject *Py_UNUSED(module), PyObject *args)
{
    int fd, error;
    const char *code;
    Py_ssize_t before, most;
    Py_buffer room, into;
    size_t came = 0;
    if (!PyArg_ParseTuple(args, "iw*w*snn", &fd, &room, &into, &code, &before, &most)) return NULL;
    const Numbers *as = numbers_of(code);
    size_t piece = into.len < (Py_ssize_t)PIECE_BYTES ? (size_t)into.len : PIECE_BYTES;
    int fit = as && as->add && into.len % (Py_ssize_t)as->size == 0 && (size_t)room.len >= piece && 0 <= before &&
              before < into.len && 0 < most;
    if (fit) {
        Py_BEGIN_ALLOW_THREADS
        came = receive(fd, room.buf, into.buf, (size_t)into.len, as, (size_t)before, (size_t)most, &error);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&room);
    PyBuffer_Release(&into);
    if (!fit) {
        PyErr_SetString(PyExc_ValueError, "the arrays' sizes do not fit each other");
        return NULL;
    }
    if (error < 0 && !came) {
        PyErr_SetNone(PyExc_EOFError);
        return NULL;
    }
    if (error > 0) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromSize_t(came);
}

static PyMethodDef methods[] = {
    {"receive_sum", receive_sum, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "folding", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_folding(void) { return PyModuleDef_Init(&module); }
