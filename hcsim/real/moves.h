/* Bytes from one place to another, as they are, or added as floats and divided: where a collective spends its time.

   They may lie at any address, hence memcpy, which costs nothing. On x86 with AVX2 memory is read
   further ahead than the processor itself looks. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define AHEAD 4096 /* bytes; by itself a processor looks ahead only within a page */
#define LINES 128  /* bytes at a time */
#define WITH_AVX2 __attribute__((target("avx2")))

static inline int has_avx2(void) { return __builtin_cpu_supports("avx2") != 0; }
static inline void expect(const char *at) { __builtin_prefetch(at + AHEAD), __builtin_prefetch(at + AHEAD + LINES / 2); }
#endif

/* ---- Added. ---- */

/* To what lies there, or on the way to somewhere else. Two loops rather than one that is given the same place twice:
   a compiler joins several additions only where it knows that no place is another. */
#define HERE char *restrict into
#define ELSEWHERE char *restrict into, const char *restrict ours

#define ADDING(NAME, PLACES, OURS, NUMBER)                                      \
    static void NAME(PLACES, const char *restrict from, size_t n)               \
    {                                                                           \
        for (size_t i = 0; i < n; i++) {                                        \
            NUMBER sum, term;                                                   \
            memcpy(&sum, OURS + i * sizeof sum, sizeof sum);                    \
            memcpy(&term, from + i * sizeof term, sizeof term);                 \
            sum += term;                                                        \
            memcpy(into + i * sizeof sum, &sum, sizeof sum);                    \
        }                                                                       \
    }

ADDING(add_floats, HERE, into, float)
ADDING(add_doubles, HERE, into, double)
ADDING(add_floats_on, ELSEWHERE, ours, float)
ADDING(add_doubles_on, ELSEWHERE, ours, double)

#if defined(__x86_64__)
#define ADDING_WIDE(NAME, PLACES, OURS, NUMBER, REGISTER, LOAD, ADD, STORE)                                  \
    WITH_AVX2 static size_t NAME(PLACES, const char *restrict from, size_t bytes)                            \
    {                                                                                                        \
        size_t done = 0;                                                                                     \
        for (; done + LINES <= bytes; done += LINES) {                                                       \
            expect(OURS + done), expect(from + done);                                                        \
            for (size_t i = done; i < done + LINES; i += sizeof(REGISTER))                                   \
                STORE((NUMBER *)(into + i),                                                                  \
                      ADD(LOAD((const NUMBER *)(OURS + i)), LOAD((const NUMBER *)(from + i))));              \
        }                                                                                                    \
        return done;                                                                                         \
    }

ADDING_WIDE(add_wide_floats, HERE, into, float, __m256, _mm256_loadu_ps, _mm256_add_ps, _mm256_storeu_ps)
ADDING_WIDE(add_wide_doubles, HERE, into, double, __m256d, _mm256_loadu_pd, _mm256_add_pd, _mm256_storeu_pd)
ADDING_WIDE(add_wide_floats_on, ELSEWHERE, ours, float, __m256, _mm256_loadu_ps, _mm256_add_ps, _mm256_storeu_ps)
ADDING_WIDE(add_wide_doubles_on, ELSEWHERE, ours, double, __m256d, _mm256_loadu_pd, _mm256_add_pd, _mm256_storeu_pd)
#endif

/* Whole elements, floats of 4 or of 8 bytes. */
static inline void add(char *restrict into, const char *restrict from, size_t bytes, size_t element)
{
    int single = element == sizeof(float);
    size_t done = 0;
#if defined(__x86_64__)
    if (has_avx2()) done = (single ? add_wide_floats : add_wide_doubles)(into, from, bytes);
#endif
    (single ? add_floats : add_doubles)(into + done, from + done, (bytes - done) / element);
}

/* The same, but the sums go to `into`, and `ours` stays as it is. */
static inline void add_on(char *restrict into, const char *restrict ours, const char *restrict from, size_t bytes,
                          size_t element)
{
    int single = element == sizeof(float);
    size_t done = 0;
#if defined(__x86_64__)
    if (has_avx2()) done = (single ? add_wide_floats_on : add_wide_doubles_on)(into, ours, from, bytes);
#endif
    (single ? add_floats_on : add_doubles_on)(into + done, ours + done, from + done, (bytes - done) / element);
}

/* ---- Divided. ---- */

#define DIVIDING(NAME, NUMBER)                                        \
    static void NAME(char *into, size_t n, NUMBER divisor)            \
    {                                                                 \
        for (size_t i = 0; i < n; i++) {                              \
            NUMBER sum;                                               \
            memcpy(&sum, into + i * sizeof sum, sizeof sum);          \
            sum /= divisor;                                           \
            memcpy(into + i * sizeof sum, &sum, sizeof sum);          \
        }                                                             \
    }

DIVIDING(divide_floats, float)
DIVIDING(divide_doubles, double)

static inline void divide(char *into, size_t bytes, size_t element, double divisor)
{
    if (element == sizeof(float)) divide_floats(into, bytes / element, (float)divisor);
    else divide_doubles(into, bytes / element, divisor);
}

/* ---- As they are. ---- */

#if defined(__x86_64__)
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
