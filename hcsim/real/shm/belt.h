/* Belts: what comes from one ring goes on to another at once, frame after frame, as in every round of a ring of ranks.

   A leg is one frame's way: it comes under a header that is known beforehand, is stored or added, and goes on under
   another. A belt is made of legs that follow each other. It never waits for room: it is stuck then, and the rest is
   left to be done in the usual way, lest ranks wait for each other in a circle. */

#include <sched.h>
#include <time.h>

#include "ring.h"

#define MAX_HEAD 256
#define PATIENCE 8
#define LONG_NS 2000000 /* another rank's frame takes less, another program's time slice more */
#define MOST (CAPACITY / 2 - MAX_HEAD) /* of a payload: one is read, another written; and who writes has room for it */

typedef struct {
    Py_buffer comes; /* the header under which it comes; empty: nothing comes, and what we have goes */
    Py_buffer goes;  /* the header under which it goes on; empty: it stays here */
    Py_buffer ours;  /* our place for the payload */
    const Numbers *as; /* what has come is added to it as such; or it is what has come */
    double divisor;  /* what the sums are divided by */
    int stays;       /* the outcome is needed here, even if it goes on; so it is where it is divided */
} Leg;

typedef struct {
    PyObject_HEAD
    Rings *from, *to;
    Leg *legs;
    Py_ssize_t count, done;
    int took; /* whether anything that came was taken when it was run last */
} Belt;

enum {
    WAITS,     /* for more to come, and who writes it will wake us */
    OTHERS,    /* what comes is none of ours, or there will be no more */
    TURN_OVER, /* it can go on, but others have waited for long enough */
    STUCK,     /* it cannot */
    COMPLETE,
};

/* Whether so many bytes are there to be read; if not, the writer will wake us when they are. */
static int is_there(Rings *self, size_t bytes)
{
    Counters *ring = &self->memory->counters[!self->out];
    uint64_t read = atomic_load_explicit(&ring->read, memory_order_relaxed);
    if (atomic_load(&ring->written) - read >= bytes) return 1;
    self->reader_sleeps = 0; /* for what another belt waits for nobody will ring any more */
    atomic_store(&ring->awaited, bytes);
    if (atomic_load(&ring->written) - read < bytes) return 0;
    atomic_store(&ring->awaited, 0);
    return 1;
}

static void peek(const char *data, size_t lap, size_t at, char *into, size_t bytes)
{
    size_t before_end = least(bytes, lap - at);
    memcpy(into, data + at, before_end);
    memcpy(into + before_end, data, bytes - before_end);
}

static void lay(char *data, size_t lap, size_t at, const char *from, size_t bytes)
{
    size_t before_end = least(bytes, lap - at);
    memcpy(data + at, from, before_end);
    memcpy(data, from + before_end, bytes - before_end);
}

/* Whether the leg's frame is there, whole. Of its header `known` bytes, `begun`, have been read. */
static int has_come(Rings *from, const Leg *leg, const char *begun, size_t known)
{
    Counters *in = &from->memory->counters[!from->out];
    size_t head = (size_t)leg->comes.len;
    char rest[MAX_HEAD];
    if (known > head || memcmp(begun, leg->comes.buf, known)) return OTHERS;
    if (is_there(from, head - known)) {
        uint64_t read = atomic_load_explicit(&in->read, memory_order_relaxed);
        size_t lap = lap_of(in), bytes = head - known + (size_t)leg->ours.len;
        if (!lap || (known < head && atomic_load(&in->written) - read > lap)) return OTHERS; /* the usual way will tell */
        if (known < head) peek(from->memory->data[!from->out], lap, place(in, read, lap), rest, head - known);
        if (memcmp(rest, (const char *)leg->comes.buf + known, head - known)) return OTHERS;
        if (is_there(from, bytes)) {
            from->reader_sleeps = 0; /* whoever wrote it may ring no more */
            return COMPLETE;
        }
        if (bytes > lap / 2) return STUCK; /* its writer may sleep until more of it has been read */
    }
    from->reader_sleeps = !from->over;
    return from->over ? OTHERS : WAITS;
}

/* Whether a number would lie both at the end of a lap and at its beginning. */
static int is_torn(size_t lap, size_t at, size_t bytes, const Numbers *as)
{
    return lap - at < bytes && (lap - at) % as->size;
}

/* From one ring (or NULL) to the other (or NULL), and to our place or from there. */
static void move_on(char *on, const char *from, char *ours, size_t bytes, const Leg *leg, int far)
{
    if (!from) {
        copy(on, ours, bytes, 0);
    } else if (!leg->as->add) {
        if (on) copy(on, from, bytes, 0);
        if (leg->stays) copy(ours, from, bytes, far);
    } else if (leg->stays) {
        leg->as->add(ours, from, bytes);
        if (leg->divisor != 1.0) leg->as->divide(ours, bytes, leg->divisor);
        if (on) copy(on, ours, bytes, 0);
    } else {
        leg->as->add_on(on, ours, from, bytes);
    }
}

/* How much of a ring a belt uses, in which there is always something unread: one frame is read, one is written, and one
   waits. So does what is sent between two belts, lest the second goes around in all of it. Where there are none, who
   sends has all of it: nobody may be there yet to read. */
static size_t lap_for(size_t bytes)
{
    size_t lap = bytes * 3 / 4096 * 4096 + 4096;
    return lap < SHORT_LAP ? SHORT_LAP : least(lap, CAPACITY);
}

/* One frame, all of it or nothing: nobody waits in the middle of one. It is told to the next one when it is whole, who
   has no use for less. */
static int run_leg(Rings *from, Rings *to, const Leg *leg, const char *begun, size_t known)
{
    size_t bytes = (size_t)leg->ours.len, head_out = (size_t)leg->goes.len;
    Counters *in = &from->memory->counters[!from->out], *out = &to->memory->counters[to->out];
    const char *coming = NULL;
    char *going = NULL;
    uint64_t read = 0, written = 0;
    size_t in_lap = 0, out_lap = 0, from_at = 0, at = 0;
    if (bytes > MOST) return STUCK;
    if (leg->comes.len) {
        int come = has_come(from, leg, begun, known);
        if (come != COMPLETE) return come;
        coming = from->memory->data[!from->out];
        read = atomic_load_explicit(&in->read, memory_order_relaxed) + (size_t)leg->comes.len - known;
        if (!(in_lap = lap_of(in))) return OTHERS;
        from_at = place(in, read, in_lap);
        if (is_torn(in_lap, from_at, bytes, leg->as)) return STUCK;
    }
    if (leg->goes.len) {
        going = to->memory->data[to->out];
        written = atomic_load_explicit(&out->written, memory_order_relaxed);
        uint64_t used = written - atomic_load(&out->read);
        if (to->over) return STUCK;
        to->belts_lap = lap_for(head_out + bytes);
        if (used == 0) begin(out, written, to->belts_lap);
        out_lap = lap_of(out);
        if (used > out_lap || out_lap - used < head_out + bytes) return STUCK;
        lay(going, out_lap, place(out, written, out_lap), leg->goes.buf, head_out);
        written += head_out;
        at = place(out, written, out_lap);
        if (is_torn(out_lap, at, bytes, leg->as)) return STUCK;
    }
    for (size_t done = 0, step; done < bytes; done += step) {
        step = least(bytes - done, BLOCK);
        if (coming) step = least(step, in_lap - from_at);
        if (going) step = least(step, out_lap - at);
        move_on(going ? going + at : NULL, coming ? coming + from_at : NULL, (char *)leg->ours.buf + done, step,
                leg, bytes >= MUCH);
        if (coming) from_at = (from_at + step) % in_lap;
        if (going) at = (at + step) % out_lap;
    }
    read += bytes;
    written += bytes;
    if (going) publish(to, out, written);
    if (coming) {
        atomic_store(&in->read, read);
        if (atomic_load(&in->written) - read <= in_lap / 2 && atomic_load(&in->full)) wake(from, &in->full);
    }
    return COMPLETE;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Who is further ahead than the next one needs lets it go first, a few times: what is under way stays in the caches, and
   takes few pages. But not again when that took long: then somebody else's program has the processor. */
static void keep_pace(Rings *to, size_t bytes)
{
    Counters *out = &to->memory->counters[to->out];
    uint64_t written = atomic_load_explicit(&out->written, memory_order_relaxed);
    for (int i = 0; i < PATIENCE && written - atomic_load(&out->read) >= bytes; i++) {
        uint64_t before = now_ns();
        sched_yield();
        if (now_ns() - before > LONG_NS) return;
    }
}

/* As far as it goes. Of the header that comes first `known` bytes, `begun`, have been read. */
static int run_belt(Belt *self, const char *begun, size_t known)
{
    self->took = 0;
    for (size_t moved = 0; self->done < self->count; self->done++) {
        const Leg *leg = &self->legs[self->done];
        if (moved >= AT_ONCE) return TURN_OVER;
        if (!self->from->memory || !self->to->memory) return STUCK;
        if (leg->goes.len) keep_pace(self->to, (size_t)leg->ours.len);
        int how = run_leg(self->from, self->to, leg, begun, self->took ? 0 : known);
        if (how != COMPLETE) return how;
        self->took = self->took || leg->comes.len;
        moved += (size_t)leg->ours.len;
        sched_yield(); /* to who waits for what went: it is still in the cache */
    }
    return COMPLETE;
}
