/* A switch between tap devices, each in a network namespace of its own: lines with a rate, a queue, a delay and
 * losses, and air that all of its stations share.
 *
 * A plan comes on stdin, line by line:
 *
 *   seed NUMBER
 *   air OVERHEAD_NS AGGREGATE_BYTES
 *   pipe BPS QUEUE_BYTES DELAY_NS JITTER_NS JITTER_EVERY_NS LOSS AIR NODE
 *   ports COUNT
 *   route FROM TO PIPE...
 *   frame AT_NS FROM TO BYTES
 *   go | replay
 *
 * A frame passes the pipes of its route one after the other. A pipe drops a frame that its queue has no room for, sends
 * one after the other at its rate, and hands them on after its delay, in order. Jitter is exponential with the given
 * mean, and is drawn again each JITTER_EVERY_NS. AIR is -1 for a wire. Otherwise the pipe is one of the queues of NODE,
 * which contends for that air: when it is free, each node with something to send is equally likely to win it, and sends
 * up to AGGREGATE_BYTES of one of its queues, which it serves in turn. Each such transmission opportunity takes
 * OVERHEAD_NS, and its bytes at the rate of the pipe.
 *
 * After `go` the switch makes the namespaces and their devices, prints the descriptor of each namespace, and works until
 * stdin ends. Namespaces and devices have no names outside, so that they end with the switch and with the processes in
 * them, whoever ends it. After `replay` it makes none, and prints when each of the frames of the plan arrives. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if_tun.h>
#include <math.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define PORTS 16
#define PIPES 64
#define AIRS 4
#define NODES 17
#define HOPS 4
#define FRAME_BYTES 1600
#define READ_AT_ONCE 64
#define GRAIN_NS 50000 /* frames that come or are due within this time are handled together, which costs less */
#define NEVER INT64_MAX

struct frame {
    struct frame *next;
    int64_t due_ns;
    int from, to, hop;
    int64_t size;
    unsigned char data[FRAME_BYTES];
};

struct line {
    struct frame *head, *tail;
};

struct pipe {
    double bps, loss;
    int64_t queue_bytes, delay_ns, jitter_ns, jitter_every_ns;
    int air, node;
    struct line waiting, flying; /* a frame on a wire flies from the start, since its time is known */
    int64_t waiting_bytes, free_ns, last_due_ns, jitter_now_ns, jitter_until_ns;
    uint64_t random;
    long carried, dropped, lost;
};

struct air {
    int64_t overhead_ns, aggregate_bytes, until_ns;
    enum { IDLE, CONTENTION, TRANSMISSION } state;
    int served[NODES];
    uint64_t random;
    long opportunities;
};

struct route {
    int pipes[HOPS], length;
};

static struct pipe pipes[PIPES];
static struct air airs[AIRS];
static struct route routes[PORTS][PORTS];
static int pipe_count, air_count, port_count, taps[PORTS], is_replay;
static struct frame *spare;
static struct line replayed;

static void fail(const char *what)
{
    fprintf(stderr, "switch: %s: %s\n", what, errno ? strerror(errno) : "not understood");
    exit(1);
}

/* A number in (0, 1): SplitMix64 (Steele, Lea and Flood, 2014). */
static double uniform(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return ((double)((z ^ z >> 31) >> 11) + 0.5) / 9007199254740992.0;
}

static void append(struct line *line, struct frame *frame)
{
    frame->next = NULL;
    if (line->head)
        line->tail->next = frame;
    else
        line->head = frame;
    line->tail = frame;
}

static struct frame *pop(struct line *line)
{
    struct frame *frame = line->head;
    line->head = frame->next;
    return frame;
}

static struct frame *new_frame(void)
{
    struct frame *frame = spare;
    if (frame)
        spare = frame->next;
    else if (!(frame = malloc(sizeof *frame)))
        fail("memory");
    return frame;
}

static void release(struct frame *frame)
{
    frame->next = spare;
    spare = frame;
}

static int64_t later(int64_t one, int64_t other)
{
    return one > other ? one : other;
}

static void fly(struct pipe *pipe, struct frame *frame, int64_t sent_ns)
{
    if (pipe->jitter_ns && sent_ns >= pipe->jitter_until_ns) {
        pipe->jitter_now_ns = (int64_t)(-log(uniform(&pipe->random)) * (double)pipe->jitter_ns);
        pipe->jitter_until_ns = sent_ns + pipe->jitter_every_ns;
    }
    pipe->last_due_ns = frame->due_ns = later(pipe->last_due_ns, sent_ns + pipe->delay_ns + pipe->jitter_now_ns);
    pipe->carried++;
    append(&pipe->flying, frame);
}

static int64_t on_air_ns(const struct pipe *pipe, int64_t bytes)
{
    return (int64_t)(8e9 * (double)bytes / pipe->bps);
}

static void contend(struct air *air, int64_t at_ns)
{
    air->state = CONTENTION;
    air->until_ns = at_ns + air->overhead_ns;
}

/* The next of the node's queues that is not empty. */
static struct pipe *queue_of(struct air *air, int node)
{
    for (int step = 1; step <= pipe_count; step++) {
        struct pipe *pipe = &pipes[(air->served[node] + step) % pipe_count];
        if (pipe->waiting.head && &airs[pipe->air] == air && pipe->node == node)
            return pipe;
    }
    return NULL;
}

static void transmit(struct air *air, int64_t at_ns)
{
    struct pipe *candidates[NODES];
    int count = 0;
    for (int node = 0; node < NODES; node++)
        if ((candidates[count] = queue_of(air, node)))
            count++;
    struct pipe *pipe = candidates[(int)(uniform(&air->random) * count)];
    air->served[pipe->node] = (int)(pipe - pipes);
    int64_t bytes = 0;
    struct line burst = {0};
    do {
        bytes += pipe->waiting.head->size;
        append(&burst, pop(&pipe->waiting));
    } while (pipe->waiting.head && bytes + pipe->waiting.head->size <= air->aggregate_bytes);
    pipe->waiting_bytes -= bytes;
    air->state = TRANSMISSION;
    air->until_ns = at_ns + on_air_ns(pipe, bytes);
    air->opportunities++;
    while (burst.head)
        fly(pipe, pop(&burst), air->until_ns);
}

static void air_event(struct air *air)
{
    int64_t at_ns = air->until_ns;
    if (air->state == CONTENTION) {
        transmit(air, at_ns);
        return;
    }
    air->state = IDLE;
    air->until_ns = NEVER;
    for (int number = 0; number < pipe_count; number++)
        if (pipes[number].waiting.head && &airs[pipes[number].air] == air) {
            contend(air, at_ns);
            return;
        }
}

static void enter(struct frame *frame, int64_t at_ns)
{
    const struct route *route = &routes[frame->from][frame->to];
    struct pipe *pipe = &pipes[route->pipes[frame->hop]];
    int64_t ahead = pipe->waiting_bytes;
    if (pipe->air < 0)
        ahead = (int64_t)((double)later(pipe->free_ns - at_ns, 0) * pipe->bps / 8e9);
    if (ahead + frame->size > pipe->queue_bytes) {
        pipe->dropped++;
        release(frame);
    } else if (pipe->loss > 0 && uniform(&pipe->random) < pipe->loss) {
        pipe->lost++;
        release(frame);
    } else if (pipe->air < 0) {
        pipe->free_ns = later(pipe->free_ns, at_ns) + on_air_ns(pipe, frame->size);
        fly(pipe, frame, pipe->free_ns);
    } else {
        append(&pipe->waiting, frame);
        pipe->waiting_bytes += frame->size;
        if (airs[pipe->air].state == IDLE)
            contend(&airs[pipe->air], at_ns);
    }
}

static void deliver(struct frame *frame, int64_t at_ns)
{
    if (++frame->hop < routes[frame->from][frame->to].length) {
        enter(frame, at_ns);
        return;
    }
    if (is_replay)
        printf("%" PRId64 " %d %d %" PRId64 "\n", at_ns, frame->from, frame->to, frame->size);
    else if (write(taps[frame->to], frame->data, (size_t)frame->size) < 0 && errno != EAGAIN && errno != EIO)
        fail("write to a tap"); /* EIO: the interface is down */
    release(frame);
}

/* Do what is due until then, in the order of time; return when something is next. */
static int64_t run_until(int64_t now_ns)
{
    for (;;) {
        int64_t first_ns = NEVER;
        struct pipe *pipe = NULL;
        struct air *air = NULL;
        for (int number = 0; number < air_count; number++)
            if (airs[number].until_ns < first_ns)
                air = &airs[number], first_ns = air->until_ns;
        for (int number = 0; number < pipe_count; number++)
            if (pipes[number].flying.head && pipes[number].flying.head->due_ns < first_ns)
                pipe = &pipes[number], first_ns = pipe->flying.head->due_ns;
        if (first_ns == NEVER || first_ns > now_ns)
            return first_ns;
        if (pipe)
            deliver(pop(&pipe->flying), first_ns);
        else
            air_event(air);
    }
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Make a namespace and its eth0, with the address 02:00:00:00:00:NUMBER. The device has no offloads, so that the system
 * cuts segments and takes checksums itself. */
static int make_tap(int number)
{
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI};
    strcpy(request.ifr_name, "eth0");
    if (unshare(CLONE_NEWNET))
        fail("a network namespace");
    int space = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (space < 0 || tap < 0 || ioctl(tap, TUNSETIFF, &request))
        fail("a tap device");
    request.ifr_hwaddr = (struct sockaddr){.sa_family = ARPHRD_ETHER, .sa_data = {2, 0, 0, 0, 0, (char)number}};
    if (ioctl(tap, SIOCSIFHWADDR, &request))
        fail("the address of a tap device");
    printf("%d%c", space, number + 1 < port_count ? ' ' : '\n');
    return tap;
}

static void receive(int from, int64_t at_ns)
{
    for (int count = 0; count < READ_AT_ONCE; count++) {
        struct frame *frame = new_frame();
        frame->size = read(taps[from], frame->data, sizeof frame->data);
        /* Others than known machines, and so broadcasts too, are not served: neighbours are entered by hand. */
        int to = frame->size > 14 && !memcmp(frame->data, (unsigned char[]){2, 0, 0, 0, 0}, 5) ? frame->data[5] : PORTS;
        if (frame->size < 0 || to >= port_count || !routes[from][to].length) {
            int is_empty = frame->size < 0;
            release(frame);
            if (is_empty)
                return;
            continue;
        }
        frame->from = from, frame->to = to, frame->hop = 0;
        enter(frame, at_ns);
    }
}

static void work(void)
{
    struct pollfd ready[PORTS + 1];
    struct sched_param priority = {.sched_priority = 1};
    struct timespec grain = {.tv_nsec = GRAIN_NS};
    for (int port = 0; port < port_count; port++)
        ready[port] = (struct pollfd){.fd = taps[port] = make_tap(port), .events = POLLIN};
    ready[port_count] = (struct pollfd){.fd = 0, .events = POLLIN};
    fflush(stdout);
    /* As punctual as it can be, also beside ranks that compute. */
    prctl(PR_SET_TIMERSLACK, 1UL);
    sched_setscheduler(0, SCHED_RR, &priority);
    while (!ready[port_count].revents) {
        int64_t next_ns = run_until(now_ns()), wait_ns;
        if (next_ns != NEVER) {
            nanosleep(&grain, NULL);
            next_ns = run_until(now_ns());
        }
        wait_ns = later(next_ns - now_ns(), 0);
        struct timespec wait = {.tv_sec = wait_ns / 1000000000, .tv_nsec = wait_ns % 1000000000};
        if (ppoll(ready, (nfds_t)port_count + 1, next_ns == NEVER ? NULL : &wait, NULL) < 0 && errno != EINTR)
            fail("poll");
        int64_t at_ns = now_ns();
        run_until(at_ns);
        for (int port = 0; port < port_count; port++)
            if (ready[port].revents)
                receive(port, at_ns);
    }
}

static void replay(void)
{
    while (replayed.head) {
        struct frame *frame = pop(&replayed);
        int64_t at_ns = frame->due_ns;
        run_until(at_ns - 1);
        enter(frame, at_ns);
    }
    run_until(NEVER - 1);
}

static void read_pipe(const char *text, uint64_t seed)
{
    struct pipe *pipe = &pipes[pipe_count];
    if (pipe_count == PIPES || sscanf(text, "%lf %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %lf %d %d", &pipe->bps,
               &pipe->queue_bytes, &pipe->delay_ns, &pipe->jitter_ns, &pipe->jitter_every_ns, &pipe->loss, &pipe->air,
               &pipe->node) != 8 || !(pipe->bps > 0) || pipe->air >= air_count || pipe->node < 0 || pipe->node >= NODES)
        fail(text);
    pipe->random = seed ^ (uint64_t)++pipe_count << 32;
}

static void read_route(char *text)
{
    char *rest, *word = strtok_r(text, " \n", &rest);
    int from = word ? atoi(word) : -1, to = (word = strtok_r(NULL, " \n", &rest)) ? atoi(word) : -1;
    if (from < 0 || to < 0 || from >= port_count || to >= port_count)
        fail("a route");
    struct route *route = &routes[from][to];
    while ((word = strtok_r(NULL, " \n", &rest))) {
        if (route->length == HOPS || atoi(word) < 0 || atoi(word) >= pipe_count)
            fail("a route");
        route->pipes[route->length++] = atoi(word);
    }
}

static void read_frame(const char *text)
{
    struct frame *frame = new_frame();
    frame->hop = 0;
    if (sscanf(text, "%" SCNd64 " %d %d %" SCNd64, &frame->due_ns, &frame->from, &frame->to, &frame->size) != 4
        || frame->from < 0 || frame->to < 0 || frame->from >= port_count || frame->to >= port_count
        || !routes[frame->from][frame->to].length)
        fail(text);
    append(&replayed, frame);
}

/* Read the plan, without what is behind its last line. */
static char *read_line(char *text, size_t size)
{
    size_t length = 0;
    while (length + 1 < size && read(0, text + length, 1) == 1)
        if (text[length++] == '\n')
            break;
    text[length] = 0;
    return length ? text : NULL;
}

int main(void)
{
    char text[256];
    uint64_t seed = 1;
    while (read_line(text, sizeof text)) {
        struct air *air = &airs[air_count];
        if (sscanf(text, "seed %" SCNu64, &seed) == 1)
            continue;
        if (air_count < AIRS
            && sscanf(text, "air %" SCNd64 " %" SCNd64, &air->overhead_ns, &air->aggregate_bytes) == 2) {
            air->until_ns = NEVER;
            air->random = seed ^ (uint64_t)++air_count << 48;
        } else if (!strncmp(text, "pipe ", 5)) {
            read_pipe(text + 5, seed);
        } else if (!strncmp(text, "route ", 6)) {
            read_route(text + 6);
        } else if (!strncmp(text, "frame ", 6)) {
            read_frame(text + 6);
        } else if (!strcmp(text, "go\n")) {
            work();
            break;
        } else if (!strcmp(text, "replay\n")) {
            is_replay = 1;
            replay();
            break;
        } else if (sscanf(text, "ports %d", &port_count) != 1 || port_count < 1 || port_count > PORTS) {
            fail(text);
        }
    }
    for (int number = 0; number < pipe_count; number++) {
        const struct pipe *pipe = &pipes[number];
        printf("pipe %d carried %ld dropped %ld lost %ld\n", number, pipe->carried, pipe->dropped, pipe->lost);
    }
    return 0;
}
