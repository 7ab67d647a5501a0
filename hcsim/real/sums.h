/* Numbers that are added to others on their way, and divided at the end: where a collective spends its time. */

#include "moves.h"
#include "halves.h"

/* To what lies there, or on the way to somewhere else. Two loops rather than one that is given the same place twice:
   a compiler joins several additions only where it knows that no place is another. */
#define HERE char *restrict into
#define ELSEWHERE char *restrict into, const char *restrict ours

typedef struct {
    char code;   /* as in Python's struct, and E for bfloat16; 0: bytes, which are not added at all */
    size_t size; /* of one, in bytes */
    void (*add)(HERE, const char *restrict from, size_t bytes);
    void (*add_on)(ELSEWHERE, const char *restrict from, size_t bytes); /* the sums go to `into`, and ours stay */
    void (*divide)(char *into, size_t bytes, double divisor);           /* NULL: they have no mean */
} Numbers;

/* ---- One by one, from where wider loops have left off: `OF` what is stored a number is made, and stored again `TO`. */

#define AS_IT_IS(x) (x)
#define NOT_AT_ALL(CALL) 0

#define ADDING(NAME, PLACES, OURS, DONE, STORED, OF, TO)                              \
    static void NAME(PLACES, const char *restrict from, size_t bytes)                 \
    {                                                                                 \
        for (size_t i = DONE; i < bytes; i += sizeof(STORED)) {                       \
            STORED a, b;                                                              \
            memcpy(&a, OURS + i, sizeof a);                                           \
            memcpy(&b, from + i, sizeof b);                                           \
            a = (STORED)TO(OF(a) + OF(b));                                            \
            memcpy(into + i, &a, sizeof a);                                           \
        }                                                                             \
    }
#define BOTH_WAYS(NAME, WIDELY, ...)                                                                              \
    ADDING(add_##NAME, HERE, into, WIDELY(add_wide_##NAME(into, from, bytes)), __VA_ARGS__)                       \
    ADDING(add_##NAME##_on, ELSEWHERE, ours, WIDELY(add_wide_##NAME##_on(into, ours, from, bytes)), __VA_ARGS__)

#define DIVIDING(NAME, DONE, STORED, NUMBER, OF, TO)                                  \
    static void NAME(char *into, size_t bytes, double divisor)                        \
    {                                                                                 \
        NUMBER by = (NUMBER)divisor;                                                  \
        for (size_t i = DONE; i < bytes; i += sizeof(STORED)) {                       \
            STORED x;                                                                 \
            memcpy(&x, into + i, sizeof x);                                           \
            x = TO(OF(x) / by);                                                       \
            memcpy(into + i, &x, sizeof x);                                           \
        }                                                                             \
    }

/* ---- A register at a time: each gives the bytes that it has done. ---- */

#if defined(__x86_64__)
#define BY_AVX2(CALL) (has_avx2() ? CALL : 0)
#define BY_REGISTERS BY_AVX2

#define ADDING_WIDE(NAME, PLACES, OURS, BYTES, LOAD, ADD, STORE)                      \
    WITH_AVX2 static size_t NAME(PLACES, const char *restrict from, size_t bytes)     \
    {                                                                                 \
        size_t done = 0;                                                              \
        for (; done + LINES <= bytes; done += LINES) {                                \
            expect(OURS + done), expect(from + done);                                 \
            for (size_t i = done; i < done + LINES; i += BYTES)                       \
                STORE(into + i, ADD(LOAD(OURS + i), LOAD(from + i)));                 \
        }                                                                             \
        return done;                                                                  \
    }
#define BOTH_WAYS_WIDE(NAME, ...)                                                     \
    ADDING_WIDE(add_wide_##NAME, HERE, into, __VA_ARGS__)                             \
    ADDING_WIDE(add_wide_##NAME##_on, ELSEWHERE, ours, __VA_ARGS__)

#define DIVIDING_WIDE(NAME, LOAD, STORE)                                              \
    WITH_AVX2 static size_t NAME(char *into, size_t bytes, double divisor)            \
    {                                                                                 \
        __m256 by = _mm256_set1_ps((float)divisor);                                   \
        size_t done = 0;                                                              \
        for (; done + sizeof(__m128i) <= bytes; done += sizeof(__m128i))              \
            STORE(into + done, _mm256_div_ps(LOAD(into + done), by));                 \
        return done;                                                                  \
    }

#define LOAD_FLOATS(at) _mm256_loadu_ps((const float *)(at))
#define LOAD_DOUBLES(at) _mm256_loadu_pd((const double *)(at))
#define STORE_FLOATS(at, x) _mm256_storeu_ps((float *)(at), x)
#define STORE_DOUBLES(at, x) _mm256_storeu_pd((double *)(at), x)

BOTH_WAYS_WIDE(floats, sizeof(__m256), LOAD_FLOATS, _mm256_add_ps, STORE_FLOATS)
BOTH_WAYS_WIDE(doubles, sizeof(__m256), LOAD_DOUBLES, _mm256_add_pd, STORE_DOUBLES)
BOTH_WAYS_WIDE(fp16, sizeof(__m128i), wide_of_fp16, _mm256_add_ps, wide_to_fp16)
BOTH_WAYS_WIDE(bf16, sizeof(__m128i), wide_of_bf16, _mm256_add_ps, wide_to_bf16)
DIVIDING_WIDE(divide_wide_fp16, wide_of_fp16, wide_to_fp16)
DIVIDING_WIDE(divide_wide_bf16, wide_of_bf16, wide_to_bf16)
#elif defined(__aarch64__)
/* Of other kinds compilers make as much by themselves. */
#include <arm_neon.h>
#define BY_AVX2 NOT_AT_ALL
#define BY_REGISTERS AS_IT_IS

ADDING(add_fours, HERE, into, 0, float16x4_t, vcvt_f32_f16, vcvt_f16_f32)
ADDING(add_fours_on, ELSEWHERE, ours, 0, float16x4_t, vcvt_f32_f16, vcvt_f16_f32)

static size_t add_wide_fp16(HERE, const char *restrict from, size_t bytes)
{
    size_t whole = bytes / sizeof(float16x4_t) * sizeof(float16x4_t);
    add_fours(into, from, whole);
    return whole;
}

static size_t add_wide_fp16_on(ELSEWHERE, const char *restrict from, size_t bytes)
{
    size_t whole = bytes / sizeof(float16x4_t) * sizeof(float16x4_t);
    add_fours_on(into, ours, from, whole);
    return whole;
}
#else
#define BY_AVX2 NOT_AT_ALL
#define BY_REGISTERS NOT_AT_ALL
#endif

/* ---- All of them. ---- */

BOTH_WAYS(floats, BY_AVX2, float, AS_IT_IS, AS_IT_IS)
BOTH_WAYS(doubles, BY_AVX2, double, AS_IT_IS, AS_IT_IS)
BOTH_WAYS(fp16, BY_REGISTERS, uint16_t, of_fp16, to_fp16)
BOTH_WAYS(bf16, BY_AVX2, uint16_t, of_bf16, to_bf16)
BOTH_WAYS(int8, NOT_AT_ALL, uint8_t, AS_IT_IS, AS_IT_IS)
BOTH_WAYS(int16, NOT_AT_ALL, uint16_t, AS_IT_IS, AS_IT_IS)
BOTH_WAYS(int32, NOT_AT_ALL, uint32_t, AS_IT_IS, AS_IT_IS)
BOTH_WAYS(int64, NOT_AT_ALL, uint64_t, AS_IT_IS, AS_IT_IS)
DIVIDING(divide_floats, 0, float, float, AS_IT_IS, AS_IT_IS)
DIVIDING(divide_doubles, 0, double, double, AS_IT_IS, AS_IT_IS)
DIVIDING(divide_fp16, BY_AVX2(divide_wide_fp16(into, bytes, divisor)), uint16_t, float, of_fp16, to_fp16)
DIVIDING(divide_bf16, BY_AVX2(divide_wide_bf16(into, bytes, divisor)), uint16_t, float, of_bf16, to_bf16)

static const Numbers KINDS[] = {
    {0, 1, NULL, NULL, NULL},
    {'f', 4, add_floats, add_floats_on, divide_floats},
    {'d', 8, add_doubles, add_doubles_on, divide_doubles},
    {'e', 2, add_fp16, add_fp16_on, divide_fp16},
    {'E', 2, add_bf16, add_bf16_on, divide_bf16},
    {'B', 1, add_int8, add_int8_on, NULL},
    {'H', 2, add_int16, add_int16_on, NULL},
    {'I', 4, add_int32, add_int32_on, NULL},
    {'Q', 8, add_int64, add_int64_on, NULL},
};
static const Numbers *const AS_THEY_ARE = KINDS;
#define LARGEST 8

/* Those with a code of one character, or none at all; NULL: there are none such. */
static inline const Numbers *numbers_of(const char *code)
{
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
        if (code[0] == KINDS[i].code && (!code[0] || !code[1])) return &KINDS[i];
    return NULL;
}
