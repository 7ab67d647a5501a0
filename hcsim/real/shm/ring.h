/* Two rings of bytes in memory that two processes share, one for each direction.

   Each ring has one writer and one reader, which see each other only through its counters. Who finds nothing to do says
   so in the ring, looks once more, and is then woken by a byte on a socket, the bell. The other end is a process of the
   same user; what it wrote into the counters is checked all the same before it is used. */

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#include "../sums.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores the signal */
#endif

#define CAPACITY ((size_t)4224 * 1024) /* 2 MiB and what comes with them fit twice: the one is read, the other written */
#define SHORT_LAP ((size_t)1088 * 1024) /* as much of it is used at least, where there is always something unread */
#define BLOCK ((size_t)256 * 1024)  /* is told to the other end as soon as it has been copied */
#define ENOUGH ((size_t)512 * 1024) /* who waits for more is woken for this much */
#define AT_ONCE CAPACITY            /* a call ends then, however fast the other end is: its thread has more to do */
#define MUCH ((size_t)1024 * 1024)  /* and more do not stay in a cache until they are used */

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "a lock would be one process's own");
_Static_assert(2 * ENOUGH <= SHORT_LAP, "who waits for that much and who waits for room would both sleep");

typedef struct {
    _Alignas(128) _Atomic uint64_t written; /* bytes since the beginning; the writer's */
    _Atomic uint64_t start;                 /* the count at which a lap began; the writer's, while nothing is unread */
    _Atomic uint64_t lap;                   /* after so many bytes it begins at the memory's first one again; likewise */
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
    size_t belts_lap; /* that of the belts which write to `out`, and of what is sent between them; 0: there were none */
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

/* Begin at the beginning, since nothing is unread: what need not be large stays in the caches, and takes few pages. */
static void begin(Counters *ring, uint64_t written, size_t lap)
{
    atomic_store_explicit(&ring->start, written, memory_order_relaxed);
    atomic_store_explicit(&ring->lap, lap, memory_order_relaxed);
}

/* Where in the memory a count lies. */
static size_t place(Counters *ring, uint64_t count, size_t lap)
{
    return (size_t)((count - atomic_load_explicit(&ring->start, memory_order_relaxed)) % lap);
}

/* How long a lap is, as its writer says; 0 if that cannot be. */
static size_t lap_of(Counters *ring)
{
    uint64_t lap = atomic_load_explicit(&ring->lap, memory_order_relaxed);
    return SHORT_LAP <= lap && lap <= CAPACITY && lap % 4096 == 0 ? (size_t)lap : 0;
}

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
    for (int i = 0; i < count; i++) {
        const char *from = parts[i].buf;
        size_t left = (size_t)parts[i].len;
        while (left) {
            /* Not merely acquired: that could be loaded before `full`, which who looks once more has just stored. */
            size_t used = (size_t)(written - atomic_load(&ring->read));
            if (used == 0) begin(ring, written, self->belts_lap ? self->belts_lap : CAPACITY);
            size_t lap = lap_of(ring);
            if (!lap || used > lap) return BROKEN;
            size_t at = place(ring, written, lap);
            size_t step = least(least(left, BLOCK), least(lap - used, lap - at));
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

/* Take `bytes`, all within the ring: added as such numbers, or as they are. */
static void take(const char *data, size_t lap, size_t at, char *into, size_t bytes, const Numbers *as, int far)
{
    size_t whole = least(bytes, (lap - at) / as->size * as->size);
    char torn[LARGEST];
    if (!as->add) {
        copy(into, data + at, whole, far);
        copy(into + whole, data, bytes - whole, far);
        return;
    }
    as->add(into, data + at, whole);
    if (whole == bytes) return;
    size_t before_end = lap - at - whole; /* a number may lie at the end and at the beginning */
    if (before_end) {
        memcpy(torn, data + at + whole, before_end);
        memcpy(torn + before_end, data, as->size - before_end);
        as->add(into + whole, torn, as->size);
        whole += as->size;
    }
    as->add(into + whole, data + (before_end ? as->size - before_end : 0), bytes - whole);
}

static Py_ssize_t get(Rings *self, char *into, size_t bytes, const Numbers *as, int far)
{
    Counters *ring = &self->memory->counters[!self->out];
    const char *data = self->memory->data[!self->out];
    uint64_t read = atomic_load_explicit(&ring->read, memory_order_relaxed);
    uint64_t written = atomic_load(&ring->written);
    size_t lap = lap_of(ring);
    if (written - read > lap) return BROKEN;
    size_t moved = 0, there = least((size_t)(written - read), bytes) / as->size * as->size;
    while (moved < there) {
        size_t step = least(there - moved, BLOCK);
        take(data, lap, place(ring, read, lap), into + moved, step, as, far);
        moved += step;
        read += step;
        atomic_store(&ring->read, read);
        if (written - read <= lap / 2 && atomic_load(&ring->full)) wake(self, &ring->full);
    }
    return (Py_ssize_t)moved;
}

/* Until all that is wanted has come, or nothing is there, of which the writer will tell. */
static Py_ssize_t get_or_sleep(Rings *self, char *into, size_t bytes, const Numbers *as, int *sleeps)
{
    if (!self->memory) return CLOSED;
    _Atomic uint64_t *awaited = &self->memory->counters[!self->out].awaited;
    size_t got = 0;
    *sleeps = 0;
    while (got < bytes) {
        Py_ssize_t moved = get(self, into + got, bytes - got, as, bytes >= MUCH);
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
