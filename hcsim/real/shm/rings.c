/* Rings and belts for Python; see ring.h and belt.h. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "belt.h"

#define MAX_PARTS 8

/* -- the memory */

static int sealed(int fd)
{
#ifdef F_GET_SEALS
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK);
#else
    (void)fd;
    return 1; /* shared memory has its size for ever */
#endif
}

static int new_memory(void)
{
#ifdef F_GET_SEALS
    int fd = memfd_create("hcsim", MFD_CLOEXEC | MFD_ALLOW_SEALING);
#else
    static unsigned tried;
    char name[32];
    int fd = -1;
    for (int i = 0; i < 100 && fd < 0 && (i == 0 || errno == EEXIST); i++) {
        PyOS_snprintf(name, sizeof name, "/hcsim-%ld-%u", (long)getpid(), tried++);
        fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    }
    if (fd >= 0) shm_unlink(name);
#endif
    if (fd < 0) return -1;
    if (ftruncate(fd, sizeof(Memory)) < 0) goto failed;
#ifdef F_GET_SEALS
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) goto failed;
#endif
    return fd;
failed:;
    int why = errno;
    close(fd);
    errno = why;
    return -1;
}

/* -- Python */

static PyObject *py_memory(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    int fd = new_memory();
    return fd < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLong(fd);
}

static PyObject *rings_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    int fd, bell, first;
    struct stat found;
    if (!PyArg_ParseTuple(args, "iip", &fd, &bell, &first)) return NULL;
    if (fstat(fd, &found) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    if (found.st_size < (off_t)sizeof(Memory) || !sealed(fd)) {
        errno = EPROTO;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    void *memory = mmap(NULL, sizeof(Memory), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    Rings *self = (Rings *)PyType_GenericAlloc(type, 0);
    if (!self) {
        munmap(memory, sizeof(Memory));
        return NULL;
    }
    self->memory = memory;
    self->bell = bell;
    self->out = !first;
    return (PyObject *)self;
}

static void let_go(Rings *self)
{
    if (self->memory) munmap(self->memory, sizeof(Memory));
    self->memory = NULL;
}

static PyObject *rings_close(PyObject *object, PyObject *Py_UNUSED(none))
{
    let_go((Rings *)object);
    Py_RETURN_NONE;
}

static void rings_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_ClearWeakRefs(object);
    let_go((Rings *)object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *result(Py_ssize_t moved)
{
    if (moved >= 0) return PyLong_FromSsize_t(moved);
    if (moved == WOULD_BLOCK) { /* which happens often, so without a text that nobody reads */
        PyErr_SetNone(PyExc_BlockingIOError);
        return NULL;
    }
    errno = moved == BROKEN ? EPROTO : EBADF;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *rings_write(PyObject *object, PyObject *given)
{
    Rings *self = (Rings *)object;
    Py_buffer parts[MAX_PARTS];
    int count = 0;
    Py_ssize_t moved = WOULD_BLOCK, wanted = PySequence_Size(given);
    if (wanted < 0) return NULL;
    if (wanted > MAX_PARTS) return PyErr_Format(PyExc_ValueError, "%zd parts are too many", wanted);
    for (; count < wanted; count++) {
        PyObject *part = PySequence_GetItem(given, count);
        int failed = !part || PyObject_GetBuffer(part, &parts[count], PyBUF_SIMPLE) < 0;
        Py_XDECREF(part);
        if (failed) goto release;
    }
    if (self->over) {
        errno = EPIPE;
        PyErr_SetFromErrno(PyExc_OSError);
        goto release;
    }
    Py_BEGIN_ALLOW_THREADS
    moved = put_or_sleep(self, parts, count, &self->writer_sleeps);
    Py_END_ALLOW_THREADS
release:
    while (count) PyBuffer_Release(&parts[--count]);
    return PyErr_Occurred() ? NULL : result(moved);
}

static PyObject *rings_read(PyObject *object, PyObject *given)
{
    Rings *self = (Rings *)object;
    Py_buffer into;
    Py_ssize_t moved;
    if (PyObject_GetBuffer(given, &into, PyBUF_WRITABLE) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    moved = get_or_sleep(self, into.buf, least((size_t)into.len, AT_ONCE), AS_THEY_ARE, &self->reader_sleeps);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&into);
    return result(moved == WOULD_BLOCK && self->over ? 0 : moved);
}

static PyObject *rings_add(PyObject *object, PyObject *args)
{
    Rings *self = (Rings *)object;
    Py_buffer into;
    const char *code;
    Py_ssize_t have, most, moved = 0;
    if (!PyArg_ParseTuple(args, "w*snn", &into, &code, &have, &most)) return NULL;
    const Numbers *as = numbers_of(code);
    Py_ssize_t size = as && as->add ? (Py_ssize_t)as->size : 0;
    int fit = size && into.len % size == 0 && 0 <= have && have < into.len && have % size == 0;
    if (fit) {
        size_t wanted = least((size_t)(into.len - have), (size_t)(most < size ? size : most / size * size));
        Py_BEGIN_ALLOW_THREADS
        moved = get_or_sleep(self, (char *)into.buf + have, wanted, as, &self->reader_sleeps);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&into);
    if (!fit) {
        PyErr_SetString(PyExc_ValueError, "the sizes do not fit each other");
        return NULL;
    }
    if (moved == WOULD_BLOCK && self->over) {
        PyErr_SetNone(PyExc_EOFError);
        return NULL;
    }
    return result(moved == WOULD_BLOCK ? 0 : moved);
}

static PyObject *rings_rung(PyObject *object, PyObject *over)
{
    Rings *self = (Rings *)object;
    self->reader_sleeps = self->writer_sleeps = 0;
    self->over = self->over || PyObject_IsTrue(over) == 1;
    Py_RETURN_NONE;
}

/* Whether it may sleep: somebody will ring for the next byte. */
static PyObject *rings_let_reader_sleep(PyObject *object, PyObject *Py_UNUSED(none))
{
    Rings *self = (Rings *)object;
    if (self->over || !self->memory) Py_RETURN_FALSE; /* who would wake it? */
    self->reader_sleeps = self->reader_sleeps || doze(self);
    return PyBool_FromLong(self->reader_sleeps);
}

static PyObject *rings_writer_sleeps(PyObject *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(((Rings *)self)->writer_sleeps && !((Rings *)self)->over);
}

static PyObject *rings_belt(PyObject *object, PyObject *args);

static PyMethodDef rings_methods[] = {
    {"write", rings_write, METH_O, NULL},
    {"read", rings_read, METH_O, NULL},
    {"add", rings_add, METH_VARARGS, NULL},
    {"belt", rings_belt, METH_VARARGS, NULL},
    {"rung", rings_rung, METH_O, NULL},
    {"close", rings_close, METH_NOARGS, NULL},
    {"let_reader_sleep", rings_let_reader_sleep, METH_NOARGS, NULL},
    {"writer_sleeps", rings_writer_sleeps, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef rings_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Rings, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot rings_slots[] = {
    {Py_tp_new, rings_new},
    {Py_tp_dealloc, rings_dealloc},
    {Py_tp_methods, rings_methods},
    {Py_tp_members, rings_members},
    {0, NULL},
};

static PyType_Spec rings_spec = {"hcsim.real.shm.rings.Rings", sizeof(Rings), 0, Py_TPFLAGS_DEFAULT, rings_slots};

/* -- belts */

static void release(Leg *leg)
{
    PyBuffer_Release(&leg->comes);
    PyBuffer_Release(&leg->goes);
    PyBuffer_Release(&leg->ours);
}

static void belt_dealloc(PyObject *object)
{
    Belt *self = (Belt *)object;
    PyTypeObject *type = Py_TYPE(object);
    while (self->count) release(&self->legs[--self->count]);
    PyMem_Free(self->legs);
    Py_XDECREF((PyObject *)self->from);
    Py_XDECREF((PyObject *)self->to);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static int parse(PyObject *given, Leg *leg)
{
    PyObject *ours;
    const char *code;
    int divisor;
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "a leg is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(given, "y*y*Ospi", &leg->comes, &leg->goes, &ours, &code, &leg->stays, &divisor)) return -1;
    const Numbers *as = leg->as = numbers_of(code);
    leg->divisor = divisor;
    leg->stays = leg->stays || !leg->goes.len || divisor != 1;
    if (PyObject_GetBuffer(ours, &leg->ours, leg->comes.len ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0) {
        if (as && leg->ours.len % (Py_ssize_t)as->size == 0 && divisor && (divisor == 1 || as->divide) &&
            (leg->comes.len || leg->goes.len) && leg->comes.len <= MAX_HEAD && leg->goes.len <= MAX_HEAD)
            return 0;
        PyErr_SetString(PyExc_ValueError, "the sizes do not fit each other");
    }
    release(leg);
    return -1;
}

static PyTypeObject *belt_type;

static PyObject *rings_belt(PyObject *object, PyObject *args)
{
    PyObject *to, *legs;
    if (!PyArg_ParseTuple(args, "O!O!", Py_TYPE(object), &to, &PyList_Type, &legs)) return NULL;
    Belt *self = (Belt *)PyType_GenericAlloc(belt_type, 0);
    if (!self) return NULL;
    self->from = (Rings *)Py_NewRef(object);
    self->to = (Rings *)Py_NewRef(to);
    Py_ssize_t count = PyList_Size(legs);
    self->legs = PyMem_Calloc((size_t)count, sizeof(Leg));
    if (!self->legs) PyErr_NoMemory();
    for (; self->legs && self->count < count; self->count++)
        if (parse(PyList_GetItem(legs, self->count), &self->legs[self->count]) < 0) break;
    if (PyErr_Occurred()) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *belt_run(PyObject *object, PyObject *begun)
{
    Py_buffer read;
    int how;
    if (PyObject_GetBuffer(begun, &read, PyBUF_SIMPLE) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    how = run_belt((Belt *)object, read.buf, (size_t)read.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&read);
    return PyLong_FromLong(how);
}

static PyMethodDef belt_methods[] = {{"run", belt_run, METH_O, NULL}, {NULL, NULL, 0, NULL}};

static PyMemberDef belt_members[] = {
    {"done", T_PYSSIZET, offsetof(Belt, done), READONLY, NULL},
    {"took", T_INT, offsetof(Belt, took), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot belt_slots[] = {
    {Py_tp_dealloc, belt_dealloc},
    {Py_tp_methods, belt_methods},
    {Py_tp_members, belt_members},
    {0, NULL},
};

static PyType_Spec belt_spec = {
    "hcsim.real.shm.rings.Belt", sizeof(Belt), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, belt_slots};

static int fill(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&rings_spec);
    int failed = !type || PyModule_AddObjectRef(module, "Rings", type) < 0;
    Py_XDECREF(type);
    belt_type = failed ? NULL : (PyTypeObject *)PyType_FromSpec(&belt_spec);
    failed = !belt_type || PyModule_AddObjectRef(module, "Belt", (PyObject *)belt_type) < 0 ||
             PyModule_AddIntConstant(module, "MOST_BYTES", (long)MOST) < 0;
    return failed ? -1 : 0;
}

static PyMethodDef methods[] = {
    {"memory", py_memory, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "rings", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_rings(void) { return PyModuleDef_Init(&module); }
