/* Two rings of bytes in memory that two processes share, one for each direction.

   Each ring has one writer and one reader, which see each other only through its counters. Who finds nothing to do says
   so in the ring, looks once more, and is then woken by a byte on a socket, the bell. The other end is a process of the
   same user; what it wrote into the counters is checked all the same before it is used. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "moves.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores the signal */
#endif

#define CAPACITY ((size_t)4224 * 1024) /* 2 MiB and what comes with them fit twice: the one is read, the other written */
#define BLOCK ((size_t)256 * 1024)  /* is told to the other end as soon as it has been copied */
#define ENOUGH ((size_t)512 * 1024) /* who waits for more is woken for this much */
#define AT_ONCE CAPACITY            /* a call ends then, however fast the other end is: its thread has more to do */
#define MUCH ((size_t)1024 * 1024)  /* and more do not stay in a cache until they are used */
#define MAX_PARTS 8

typedef struct {
    _Alignas(128) _Atomic uint64_t written; /* bytes since the beginning; the writer's */
    _Atomic uint64_t start;                 /* the count at which the memory's first byte was written last */
    _Alignas(128) _Atomic uint64_t read;    /* the reader's */
    _Alignas(128) _Atomic uint64_t awaited; /* how much the reader sleeps for, or 0; cleared by who wakes it */
    _Atomic uint64_t full;                  /* whether the writer sleeps; likewise */
} Counters;

typedef struct {
    Counters counters[2];
    char data[2][CAPACITY];
} Memory;

typedef struct {
    PyObject_HEAD
    PyObject *weak;
    Memory *memory; /* NULL: it has been let go */
    int out;  /* which of the two rings we write to */
    int bell; /* belongs to whoever made us */
    int over; /* the other end has gone; what it wrote can still be read */
    int reader_sleeps, writer_sleeps;
} Rings;

enum { WOULD_BLOCK = -1, BROKEN = -2, CLOSED = -3 };

static void wake(Rings *self, _Atomic uint64_t *sleeps)
{
    if (!atomic_exchange(sleeps, 0)) return;
    /* Never blocks: a socket without room has bells enough in it. That the peer has gone is seen at the bell's end. */
    while (send(self->bell, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno == EINTR) {}
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* -- writing */

static void publish(Rings *self, Counters *ring, uint64_t written)
{
    atomic_store(&ring->written, written);
    uint64_t awaited = atomic_load(&ring->awaited);
    if (awaited && written - atomic_load(&ring->read) >= awaited) wake(self, &ring->awaited);
}

/* Copy as much as there is room for, up to AT_ONCE; returns how much that was. */
static Py_ssize_t put(Rings *self, const Py_buffer *parts, int count)
{
    Counters *ring = &self->memory->counters[self->out];
    char *data = self->memory->data[self->out];
    uint64_t before = atomic_load_explicit(&ring->written, memory_order_relaxed), written = before, told = before;
    uint64_t start = atomic_load_explicit(&ring->start, memory_order_relaxed);
    for (int i = 0; i < count; i++) {
        const char *from = parts[i].buf;
        size_t left = (size_t)parts[i].len;
        while (left) {
            /* Not merely acquired: that could be loaded before `full`, which who looks once more has just stored. */
            size_t used = (size_t)(written - atomic_load(&ring->read));
            if (used > CAPACITY) return BROKEN;
            if (used == 0) { /* begin at the beginning: what need not be large stays in the cache */
                start = written;
                atomic_store_explicit(&ring->start, start, memory_order_relaxed);
            }
            size_t at = (size_t)((written - start) % CAPACITY);
            size_t step = least(least(left, BLOCK), least(CAPACITY - used, CAPACITY - at));
            step = least(step, AT_ONCE - (size_t)(written - before));
            if (!step) goto done;
            copy(data + at, from, step, 0);
            from += step;
            left -= step;
            written += step;
            if (written - told >= BLOCK) publish(self, ring, told = written);
        }
    }
done:
    if (written != told) publish(self, ring, written);
    return (Py_ssize_t)(written - before);
}

/* Until all has been written or there is no room, of which the reader will tell. */
static Py_ssize_t put_or_sleep(Rings *self, const Py_buffer *parts, int count, int *sleeps)
{
    if (!self->memory) return CLOSED;
    _Atomic uint64_t *full = &self->memory->counters[self->out].full;
    Py_ssize_t moved = put(self, parts, count);
    *sleeps = moved == 0;
    if (moved) return moved;
    atomic_store(full, 1);
    moved = put(self, parts, count); /* there may be room by now, and nobody would tell */
    if (!moved) return WOULD_BLOCK;
    *sleeps = 0;
    atomic_store(full, 0);
    return moved;
}

/* -- reading */

/* Take `bytes`, all within the ring: as they are where `element` is 1, else added as floats of that size. */
static void take(const char *data, size_t at, char *into, size_t bytes, size_t element, int far)
{
    size_t whole = least(bytes, (CAPACITY - at) / element * element);
    char torn[sizeof(double)];
    if (element == 1) {
        copy(into, data + at, whole, far);
        copy(into + whole, data, bytes - whole, far);
        return;
    }
    add(into, data + at, whole, element);
    if (whole == bytes) return;
    size_t before_end = CAPACITY - at - whole; /* an element may lie at the end and at the beginning */
    if (before_end) {
        memcpy(torn, data + at + whole, before_end);
        memcpy(torn + before_end, data, element - before_end);
        add(into + whole, torn, element, element);
        whole += element;
    }
    add(into + whole, data + (before_end ? element - before_end : 0), bytes - whole, element);
}

static Py_ssize_t get(Rings *self, char *into, size_t bytes, size_t element, int far)
{
    Counters *ring = &self->memory->counters[!self->out];
    const char *data = self->memory->data[!self->out];
    uint64_t read = atomic_load_explicit(&ring->read, memory_order_relaxed);
    uint64_t written = atomic_load(&ring->written);
    if (written - read > CAPACITY) return BROKEN;
    uint64_t start = atomic_load_explicit(&ring->start, memory_order_relaxed);
    size_t moved = 0, there = least((size_t)(written - read), bytes) / element * element;
    while (moved < there) {
        size_t step = least(there - moved, BLOCK);
        take(data, (size_t)((read - start) % CAPACITY), into + moved, step, element, far);
        moved += step;
        read += step;
        atomic_store(&ring->read, read);
        if (written - read <= CAPACITY / 2 && atomic_load(&ring->full)) wake(self, &ring->full);
    }
    return (Py_ssize_t)moved;
}

/* Until all that is wanted has come, or nothing is there, of which the writer will tell. */
static Py_ssize_t get_or_sleep(Rings *self, char *into, size_t bytes, size_t element, int *sleeps)
{
    if (!self->memory) return CLOSED;
    _Atomic uint64_t *awaited = &self->memory->counters[!self->out].awaited;
    size_t got = 0;
    *sleeps = 0;
    while (got < bytes) {
        Py_ssize_t moved = get(self, into + got, bytes - got, element, bytes >= MUCH);
        if (moved == BROKEN) return BROKEN;
        if (!moved && *sleeps) return got ? (Py_ssize_t)got : WOULD_BLOCK;
        got += (size_t)moved;
        *sleeps = !moved; /* look once more before: something may have come by now, and nobody would tell */
        atomic_store(awaited, moved ? 0 : least(bytes - got, ENOUGH));
    }
    return (Py_ssize_t)got;
}

/* Whether the writer will wake us for the next byte, of which there is none yet. */
static int doze(Rings *self)
{
    Counters *ring = &self->memory->counters[!self->out];
    uint64_t read = atomic_load_explicit(&ring->read, memory_order_relaxed);
    if (atomic_load(&ring->written) != read) return 0;
    atomic_store(&ring->awaited, 1);
    return atomic_load(&ring->written) == read; /* look once more, as above */
}

/* -- passing on */

enum { NOT_SO, NOT_YET, PASSED };

/* How much is there to be read, at least `bytes`; or 0, and the writer will wake us when it is so much. */
static uint64_t whole(Rings *self, size_t bytes)
{
    Counters *ring = &self->memory->counters[!self->out];
    uint64_t read = atomic_load_explicit(&ring->read, memory_order_relaxed);
    uint64_t there = atomic_load(&ring->written) - read;
    if (there >= bytes) return there;
    atomic_store(&ring->awaited, bytes);
    if (atomic_load(&ring->full)) wake(self, &ring->full); /* it may sleep for room that there is: we read no further */
    there = atomic_load(&ring->written) - read;
    if (there < bytes) return 0;
    atomic_store(&ring->awaited, 0);
    return there;
}

static void lay(char *data, size_t at, const char *from, size_t bytes)
{
    size_t before_end = least(bytes, CAPACITY - at);
    memcpy(data + at, from, before_end);
    memcpy(data, from + before_end, bytes - before_end);
}

/* From one ring to the other: as it is where `element` is 1, else added to what we have. `keep`: and stays with us. */
static void move_on(char *on, const char *from, char *ours, size_t bytes, size_t element, int keep, int far)
{
    if (element == 1) {
        copy(on, from, bytes, 0);
        if (keep) copy(ours, from, bytes, far);
    } else if (keep) {
        add(ours, from, bytes, element);
        copy(on, ours, bytes, 0);
    } else {
        add_on(on, ours, from, bytes, element);
    }
}

/* A payload that has come goes on behind `head` into another ring; see above. All of it or nothing, so that nobody
   waits in the middle of a frame. */
static int pass_on(Rings *self, Rings *to, const Py_buffer *head, char *ours, size_t bytes, size_t element, int keep)
{
    size_t needed = (size_t)head->len + bytes;
    if (!self->memory || !to->memory || to->over || !bytes || needed > CAPACITY) return NOT_SO;
    uint64_t there = whole(self, bytes);
    self->reader_sleeps = !there;
    if (!there) return self->over ? NOT_SO : NOT_YET;

    Counters *in = &self->memory->counters[!self->out], *out = &to->memory->counters[to->out];
    const char *coming = self->memory->data[!self->out];
    char *going = to->memory->data[to->out];
    uint64_t read = atomic_load_explicit(&in->read, memory_order_relaxed);
    uint64_t written = atomic_load_explicit(&out->written, memory_order_relaxed);
    uint64_t in_start = atomic_load_explicit(&in->start, memory_order_relaxed);
    uint64_t out_start = atomic_load_explicit(&out->start, memory_order_relaxed);
    uint64_t used = written - atomic_load(&out->read);
    if (there > CAPACITY || used > CAPACITY || CAPACITY - used < needed) return NOT_SO;
    if (used == 0) atomic_store_explicit(&out->start, out_start = written, memory_order_relaxed);
    if ((read - in_start) % element || (written + (size_t)head->len - out_start) % element) return NOT_SO; /* torn */

    lay(going, (size_t)((written - out_start) % CAPACITY), head->buf, (size_t)head->len);
    written += (size_t)head->len;
    for (size_t done = 0, step; done < bytes; done += step) {
        size_t from = (size_t)((read - in_start) % CAPACITY), at = (size_t)((written - out_start) % CAPACITY);
        step = least(least(bytes - done, BLOCK), least(CAPACITY - from, CAPACITY - at));
        move_on(going + at, coming + from, ours + done, step, element, keep, bytes >= MUCH);
        read += step;
        publish(to, out, written += step);
        atomic_store(&in->read, read);
        if (there - done - step <= CAPACITY / 2 && atomic_load(&in->full)) wake(self, &in->full);
    }
    return PASSED;
}

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
    moved = get_or_sleep(self, into.buf, least((size_t)into.len, AT_ONCE), 1, &self->reader_sleeps);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&into);
    return result(moved == WOULD_BLOCK && self->over ? 0 : moved);
}

static PyObject *rings_add(PyObject *object, PyObject *args)
{
    Rings *self = (Rings *)object;
    Py_buffer into;
    Py_ssize_t element, have, most, moved = 0;
    if (!PyArg_ParseTuple(args, "w*nnn", &into, &element, &have, &most)) return NULL;
    int fit = (element == sizeof(float) || element == sizeof(double)) && into.len % element == 0 && 0 <= have &&
              have < into.len && have % element == 0;
    if (fit) {
        size_t wanted = least((size_t)(into.len - have), (size_t)(most < element ? element : most / element * element));
        Py_BEGIN_ALLOW_THREADS
        moved = get_or_sleep(self, (char *)into.buf + have, wanted, (size_t)element, &self->reader_sleeps);
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

/* True: it has gone on. False: it cannot, at least not now. None: it has not come yet, and somebody will ring. */
static PyObject *rings_pass_on(PyObject *object, PyObject *args)
{
    PyObject *to;
    Py_buffer head, ours;
    Py_ssize_t element;
    int keep, how = NOT_SO;
    if (!PyArg_ParseTuple(args, "O!y*w*np", Py_TYPE(object), &to, &head, &ours, &element, &keep)) return NULL;
    int fit = (element == 1 || element == sizeof(float) || element == sizeof(double)) && ours.len % element == 0;
    if (fit) {
        Py_BEGIN_ALLOW_THREADS
        how = pass_on((Rings *)object, (Rings *)to, &head, ours.buf, (size_t)ours.len, (size_t)element, keep);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&head);
    PyBuffer_Release(&ours);
    if (!fit) {
        PyErr_SetString(PyExc_ValueError, "the sizes do not fit each other");
        return NULL;
    }
    if (how == NOT_YET) Py_RETURN_NONE;
    return PyBool_FromLong(how == PASSED);
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

static PyMethodDef rings_methods[] = {
    {"write", rings_write, METH_O, NULL},
    {"read", rings_read, METH_O, NULL},
    {"add", rings_add, METH_VARARGS, NULL},
    {"pass_on", rings_pass_on, METH_VARARGS, NULL},
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

static PyType_Spec rings_spec = {"hcsim.real.rings.Rings", sizeof(Rings), 0, Py_TPFLAGS_DEFAULT, rings_slots};

static int fill(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&rings_spec);
    int failed = !type || PyModule_AddObjectRef(module, "Rings", type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyMethodDef methods[] = {
    {"memory", py_memory, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "rings", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_rings(void) { return PyModuleDef_Init(&module); }
