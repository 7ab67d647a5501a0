/* Bytes from one place to another, as they are.

   They may lie at any address, hence memcpy, which costs nothing. On x86 with AVX2 memory is read
   further ahead than the processor itself looks. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define AHEAD 4096 /* bytes; by itself a processor looks ahead only within a page */
#define LINES 128  /* bytes at a time */
#define WITH_AVX2 __attribute__((target("avx2,f16c"))) /* the one came with the other, at all makers */

static inline int has_avx2(void) { return __builtin_cpu_supports("avx2") != 0; }
static inline void expect(const char *at) { __builtin_prefetch(at + AHEAD), __builtin_prefetch(at + AHEAD + LINES / 2); }

#define COPYING_WIDE(NAME, STORE)                                                                  \
    WITH_AVX2 static size_t NAME(char *restrict into, const char *restrict from, size_t bytes)     \
    {                                                                                              \
        size_t done = 0;                                                                           \
        for (; done + LINES <= bytes; done += LINES) {                                             \
            expect(from + done);                                                                   \
            for (size_t i = done; i < done + LINES; i += sizeof(__m256i))                          \
                STORE((__m256i *)(into + i), _mm256_loadu_si256((const __m256i *)(from + i)));     \
        }                                                                                          \
        return done;                                                                               \
    }

COPYING_WIDE(copy_near, _mm256_storeu_si256)
COPYING_WIDE(copy_far, _mm256_stream_si256)
#endif

/* `far`: past the caches, where it would only push out what is needed sooner. */
static inline void copy(char *restrict into, const char *restrict from, size_t bytes, int far)
{
    size_t done = 0;
    (void)far;
#if defined(__x86_64__)
    size_t head = far ? (0 - (uintptr_t)into) % (LINES / 2) : 0; /* up to where a line begins */
    if (head < bytes && has_avx2()) {
        memcpy(into, from, head);
        done = head + (far ? copy_far : copy_near)(into + head, from + head, bytes - head);
        if (far) _mm_sfence(); /* before anybody is told that it is there */
    }
#endif
    memcpy(into + done, from + done, bytes - done);
}
