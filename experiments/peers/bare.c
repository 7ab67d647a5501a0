/* One rank's part of a ring all-reduce over two non-blocking sockets, and nothing else. */
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>

#define PIECE ((size_t)65536) /* floats: what is received is added while it is in the cache */

static int failed(ssize_t moved)
{
    return moved == 0 || (moved < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

/* Send `from` to the next rank while the previous one's part comes into `into`, or is added to it. */
static int step(int previous, int next, const char *from, size_t from_bytes, float *into, size_t into_floats, int add)
{
    static float scratch[PIECE];
    size_t sent = 0, got = 0, into_bytes = into_floats * sizeof(float);
    while (sent < from_bytes || got < into_bytes) {
        struct pollfd ready[2] = {
            {.fd = sent < from_bytes ? next : -1, .events = POLLOUT},
            {.fd = got < into_bytes ? previous : -1, .events = POLLIN},
        };
        if (poll(ready, 2, -1) < 0 && errno != EINTR)
            return errno;
        if (ready[0].revents) {
            ssize_t moved = send(next, from + sent, from_bytes - sent, MSG_NOSIGNAL);
            if (failed(moved))
                return moved ? errno : EPIPE;
            sent += moved > 0 ? (size_t)moved : 0;
        }
        if (ready[1].revents) {
            size_t piece = sizeof scratch, begun = add ? got % piece : 0;
            size_t wanted = into_bytes - got < piece - begun || !add ? into_bytes - got : piece - begun;
            char *place = add ? (char *)scratch + begun : (char *)into + got;
            ssize_t moved = recv(previous, place, wanted, 0);
            if (failed(moved))
                return moved ? errno : EPIPE;
            got += moved > 0 ? (size_t)moved : 0;
            if (add && moved > 0 && (got % piece == 0 || got == into_bytes)) {
                size_t first = (got - 1) / piece * PIECE, floats = got / sizeof(float) - first;
                for (size_t i = 0; i < floats; i++)
                    into[first + i] += scratch[i];
            }
        }
    }
    return 0;
}

/* Sum `data` over all ranks, in place. Returns 0, or the number of an error. */
int all_reduce(int previous, int next, float *data, size_t length, int rank, int ranks)
{
    size_t cuts[65];
    for (int part = 0; part <= ranks; part++)
        cuts[part] = length / ranks * part + (length % ranks * part) / ranks;
    for (int round = 0; round < 2 * (ranks - 1); round++) {
        int out = (rank - round + 2 * ranks) % ranks, in = (rank - round - 1 + 2 * ranks) % ranks;
        int error = step(previous, next, (const char *)(data + cuts[out]), (cuts[out + 1] - cuts[out]) * sizeof(float),
                         data + cuts[in], cuts[in + 1] - cuts[in], round < ranks - 1);
        if (error)
            return error;
    }
    return 0;
}
