/* The inner loops of the compressors, each in one pass: what is converted is checked while it is at hand.

   plain.py says the same with numpy and torch, and stands in where there was no compiler. Both give the same bits.
   Loops are written so that a compiler vectorises them: one thread, C99, no branch for an element where there is a way.
   Floats are looked at as bits: without their sign, larger bits are a larger number, an infinity is above all
   numbers and a NaN above that. Arrays may lie at any address, hence memcpy, which costs nothing. Contracting a product
   and a sum would change bits: to be compiled with -ffp-contract=off. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

typedef ptrdiff_t count;
typedef unsigned char byte;

#define MAGNITUDE 0x7FFFFFFFu
#define INFINITE 0x7F800000u
#define LANES 16      /* as many maxima at a time as keep the processor busy */
#define CLEARED 65536 /* elements that stay in the cache; clearing fewer at a time is slower */

static inline uint16_t load16(const byte *at, count i) { uint16_t v; memcpy(&v, at + 2 * i, 2); return v; }
static inline uint32_t load32(const byte *at, count i) { uint32_t v; memcpy(&v, at + 4 * i, 4); return v; }
static inline uint64_t load64(const byte *at, count i) { uint64_t v; memcpy(&v, at + 8 * i, 8); return v; }
static inline float loadf(const byte *at, count i) { float v; memcpy(&v, at + 4 * i, 4); return v; }
static inline void store16(byte *at, count i, uint16_t v) { memcpy(at + 2 * i, &v, 2); }
static inline void store32(byte *at, count i, uint32_t v) { memcpy(at + 4 * i, &v, 4); }
static inline void store64(byte *at, count i, uint64_t v) { memcpy(at + 8 * i, &v, 8); }
static inline void storef(byte *at, count i, float v) { memcpy(at + 4 * i, &v, 4); }
static inline uint32_t as_bits(float v) { uint32_t bits; memcpy(&bits, &v, 4); return bits; }
static inline float as_float(uint32_t bits) { float v; memcpy(&v, &bits, 4); return v; }
static inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
static inline count least_of(count a, count b) { return a < b ? a : b; }

/* What the compiler would not vectorise as well is written a register at a time, in loops that leave no loop. */
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif
#if defined(__AVX2__)
#define WIDE 8 /* elements of a register */
#else
#define WIDE 4
#endif
typedef uint32_t wide __attribute__((vector_size(4 * WIDE)));

static inline wide load_wide(const byte *at, count i) { wide v; memcpy(&v, at + 4 * i, sizeof v); return v; }

/* Much of it goes past the caches to memory, if it begins with a line: it need not be read first, to be overwritten. */
#if defined(__AVX2__)
#define FAR ((count)4 << 20)
static inline int is_far(const byte *out, count bytes) { return bytes >= FAR && (uintptr_t)out % 64 == 0; }
static inline void put_wide(byte *at, wide v, int far)
{
    if (far) _mm256_stream_si256((__m256i *)at, (__m256i)v);
    else memcpy(at, &v, sizeof v);
}
static inline void settle(int far) { if (far) _mm_sfence(); } /* before anybody is told that it is there */
#else
static inline int is_far(const byte *out, count bytes) { return (void)out, (void)bytes, 0; }
static inline void put_wide(byte *at, wide v, int far) { (void)far, memcpy(at, &v, sizeof v); }
static inline void settle(int far) { (void)far; }
#endif

/* A NaN or an infinity leaves a trace, in the sign: its exponent is full, and 1 more overflows. Where the processor has an
   instruction for it, 0 times the number is added, which makes a NaN of the sum. */
static inline wide overflow(wide bits) { return (bits & INFINITE) + (1u << 23); }
#if defined(__aarch64__)
static inline wide leave_trace(wide trace, wide bits)
{
    return (wide)vfmaq_f32((float32x4_t)trace, (float32x4_t)bits, vdupq_n_f32(0));
}
static inline wide trace_left(wide trace) { return overflow(trace); }
#else
static inline wide leave_trace(wide trace, wide bits) { return trace | overflow(bits); }
static inline wide trace_left(wide trace) { return trace; }
#endif
static inline int are_finite(const wide *trace)
{
    uint32_t all = 0;
    for (int j = 0; j < 4; j++)
        for (int lane = 0; lane < WIDE; lane++) all |= trace_left(trace[j])[lane];
    return !(all >> 31);
}

/* Told so many bytes before what it will need, a processor reads memory faster: by 2 % on ARM; by a fifth or more on x86
   of the last years, which looks ahead by itself only within a page. */
#if defined(__AVX2__)
#define AHEAD 4096
#else
#define AHEAD 768
#endif
static inline void expect(const byte *x) { __builtin_prefetch(x + AHEAD), __builtin_prefetch(x + AHEAD + 64); }

/* ---- From every element one: each gives the largest magnitude that it met. ---- */

#define LINES 32 /* elements at a time: lines of the cache, whole ones where they are written */
typedef uint32_t each_loop(const byte *restrict x, byte *restrict out, count n);

/* Most by a loop that takes so many at a time, beginning with a line of the cache where that can be. */
static inline uint32_t by_lines(each_loop few, each_loop many, const byte *x, count in_bytes, byte *out, count out_bytes,
                                count n)
{
    count head = least_of(n, (count)((0 - (uintptr_t)out) % 64) / out_bytes), rest = (n - head) % LINES, end = n - rest;
    uint32_t most = few(x, out, head);
    most = larger(most, many(x + in_bytes * head, out + out_bytes * head, end - head));
    return larger(most, few(x + in_bytes * end, out + out_bytes * end, rest));
}

static uint32_t copy_few(const byte *restrict x, byte *restrict out, count n)
{
    uint32_t most = 0;
    for (count i = 0; i < n; i++) {
        uint32_t bits = load32(x, i);
        most = larger(most, bits & MAGNITUDE);
        store32(out, i, bits);
    }
    return most;
}

/* As quick as memcpy. Only says whether they are finite. */
static uint32_t copy_many(const byte *restrict x, byte *restrict out, count n)
{
    wide trace[4] = {{0}};
    int far = is_far(out, 4 * n);
    for (count i = 0; i < n; i += LINES) {
        wide some[LINES / WIDE];
        expect(x + 4 * i);
        UNROLLED for (int j = 0; j < LINES / WIDE; j++) some[j] = load_wide(x, i + WIDE * j);
        UNROLLED for (int j = 0; j < LINES / WIDE; j++) put_wide(out + 4 * (i + WIDE * j), some[j], far);
        UNROLLED for (int j = 0; j < LINES / WIDE; j++) trace[j % 4] = leave_trace(trace[j % 4], some[j]);
    }
    settle(far);
    return are_finite(trace) ? 0 : INFINITE;
}

static uint32_t copy(const byte *restrict x, byte *restrict out, count n)
{
    return by_lines(copy_few, copy_many, x, 4, out, 4, n);
}

static uint32_t to_bf16_few(const byte *restrict x, byte *restrict out, count n)
{
    uint32_t most = 0;
    for (count i = 0; i < n; i++) {
        uint32_t bits = load32(x, i);
        most = larger(most, bits & MAGNITUDE);
        store16(out, i, (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16));
    }
    return most;
}

static uint32_t from_bf16_few(const byte *restrict x, byte *restrict out, count n)
{
    uint32_t most = 0;
    for (count i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)load16(x, i) << 16;
        most = larger(most, bits & MAGNITUDE);
        store32(out, i, bits);
    }
    return most;
}

/* Below 2^-14 halves are whole multiples of 2^-24, and so are floats from 0.5 to 1: adding 0.5 rounds to them. */
static uint32_t to_fp16_few(const byte *restrict x, byte *restrict out, count n)
{
    uint32_t most = 0;
    for (count i = 0; i < n; i++) {
        uint32_t bits = load32(x, i), magnitude = bits & MAGNITUDE;
        most = larger(most, magnitude);
        uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1)) >> 13;
        uint32_t tiny = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
        uint32_t is_tiny = 0u - (magnitude < 113u << 23);
        store16(out, i, (uint16_t)((tiny & is_tiny) | (normal & ~is_tiny) | (bits & ~MAGNITUDE) >> 16));
    }
    return most;
}

static uint32_t from_fp16_few(const byte *restrict x, byte *restrict out, count n)
{
    uint32_t most = 0;
    for (count i = 0; i < n; i++) {
        uint32_t half = load16(x, i), magnitude = half & 0x7FFFu;
        most = larger(most, magnitude);
        uint32_t normal = (magnitude << 13) + (112u << 23);
        uint32_t tiny = as_bits(as_float(magnitude + as_bits(0.5f)) - 0.5f);
        uint32_t is_tiny = 0u - (magnitude < 0x400u);
        store32(out, i, (tiny & is_tiny) | (normal & ~is_tiny) | (half & 0x8000u) << 16);
    }
    return most;
}

#if defined(__AVX2__)
#include "halves.h"
#define HALVES(name, in_bytes, out_bytes)                                              \
    static uint32_t name(const byte *restrict x, byte *restrict out, count n)          \
    {                                                                                  \
        return by_lines(name##_few, name##_many, x, in_bytes, out, out_bytes, n);      \
    }
#else
#define HALVES(name, in_bytes, out_bytes) \
    static uint32_t name(const byte *restrict x, byte *restrict out, count n) { return name##_few(x, out, n); }
#endif
HALVES(to_bf16, 4, 2)
HALVES(from_bf16, 2, 4)
HALVES(to_fp16, 4, 2)
HALVES(from_fp16, 2, 4)

static uint32_t split(const byte *restrict x, byte *restrict out, count n)
{
    uint32_t most = 0;
    byte *restrict second = out + n, *restrict third = out + 2 * n, *restrict fourth = out + 3 * n;
    for (count i = 0; i < n; i++) {
        uint32_t bits = load32(x, i);
        most = larger(most, bits & MAGNITUDE);
        out[i] = (byte)bits;
        second[i] = (byte)(bits >> 8);
        third[i] = (byte)(bits >> 16);
        fourth[i] = (byte)(bits >> 24);
    }
    return most;
}

static uint32_t join(const byte *restrict x, byte *restrict out, count n)
{
    uint32_t most = 0;
    const byte *restrict second = x + n, *restrict third = x + 2 * n, *restrict fourth = x + 3 * n;
    for (count i = 0; i < n; i++) {
        uint32_t bits = x[i] | (uint32_t)second[i] << 8 | (uint32_t)third[i] << 16 | (uint32_t)fourth[i] << 24;
        most = larger(most, bits & MAGNITUDE);
        store32(out, i, bits);
    }
    return most;
}

/* ---- By blocks. ---- */

static inline void raise_to(uint32_t *restrict most, const byte *restrict x)
{
    for (int lane = 0; lane < LANES; lane++) most[lane] = larger(most[lane], load32(x, lane) & MAGNITUDE);
}

static inline uint32_t largest_lane(const uint32_t *most)
{
    uint32_t result = 0;
    for (int lane = 0; lane < LANES; lane++) result = larger(result, most[lane]);
    return result;
}

static uint32_t largest_of(const byte *restrict x, count n)
{
    uint32_t most[LANES] = {0}, rest = 0;
    count whole = n - n % LANES;
    for (count i = 0; i < whole; i += LANES) raise_to(most, x + 4 * i);
    for (count i = whole; i < n; i++) rest = larger(rest, load32(x, i) & MAGNITUDE);
    return larger(rest, largest_lane(most));
}

static void largest(const byte *restrict x, byte *restrict out, count n, count block)
{
    for (count lo = 0; lo < n; lo += block) store32(out, lo / block, largest_of(x + 4 * lo, least_of(block, n - lo)));
}

/* Beside 1.5 * 2^23 a float has no bits for a fraction: adding it rounds, ties to even, to a whole number. */
static void quantise(const byte *restrict x, const byte *restrict inverses, byte *restrict out, count n, count block)
{
    for (count lo = 0; lo < n; lo += block) {
        float inverse = loadf(inverses, lo / block);
        count end = least_of(n, lo + block);
        for (count i = lo; i < end; i++) out[i] = (byte)as_bits(loadf(x, i) * inverse + 12582912.0f);
    }
}

static void dequantise(const byte *restrict x, const byte *restrict scales, byte *restrict out, count n, count block)
{
    for (count lo = 0; lo < n; lo += block) {
        float scale = loadf(scales, lo / block);
        count end = least_of(n, lo + block);
        for (count i = lo; i < end; i++) storef(out, i, (float)(int8_t)x[i] * scale);
    }
}

/* A draw of 16 bits is the fraction from which on a quotient is rounded up. */
static void quantise_at_random(const byte *restrict x, const byte *restrict scales, const byte *restrict draws,
                               byte *restrict out, count n, count block)
{
    for (count lo = 0; lo < n; lo += block) {
        float scale = loadf(scales, lo / block);
        count end = least_of(n, lo + block);
        for (count i = lo; i < end; i++) {
            float quotient = loadf(x, i) / scale;
            quotient = quotient > 127.0f ? 127.0f : quotient;
            quotient = quotient < -127.0f ? -127.0f : quotient;
            quotient = quotient + (float)load16(draws, i) * 0x1p-16f + 0x1p-17f;
            int32_t whole = (int32_t)quotient;
            out[i] = (byte)(whole - ((float)whole > quotient));
        }
    }
}

/* ---- Signs. ---- */

/* In numpy's order. */
static float sum_of_magnitudes(const byte *x, count n)
{
    if (n > 128) {
        count half = n / 2 - n / 2 % 8;
        return sum_of_magnitudes(x, half) + sum_of_magnitudes(x + 4 * half, n - half);
    }
    float sums[8] = {0};
    count whole = n - n % 8;
    for (count i = 0; i < whole; i += 8)
        for (int lane = 0; lane < 8; lane++) sums[lane] += as_float(load32(x, i + lane) & MAGNITUDE);
    float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    for (count i = whole; i < n; i++) sum += as_float(load32(x, i) & MAGNITUDE);
    return sum;
}

static void pack(const byte *restrict x, byte *restrict out, count n)
{
    count whole = n / 8;
    for (count i = 0; i < whole; i++) {
        unsigned packed = 0;
        for (int bit = 0; bit < 8; bit++) packed |= (unsigned)(loadf(x, 8 * i + bit) < 0) << bit;
        out[i] = (byte)packed;
    }
    if (n % 8) out[whole] = 0;
    for (count i = 8 * whole; i < n; i++) out[whole] |= (byte)((loadf(x, i) < 0) << i % 8);
}

/* The table has the eight floats of every byte. */
static void unpack(const byte *restrict x, const byte *restrict table, byte *restrict out, count n)
{
    count whole = n / 8;
    for (count i = 0; i < whole; i++) memcpy(out + 32 * i, table + 32 * x[i], 32);
    if (n % 8) memcpy(out + 32 * whole, table + 32 * x[whole], (size_t)(4 * (n % 8)));
}

/* ---- A few of many. ---- */

/* How many magnitudes from lo to hi are at least that; they are written as long as there is room. */
static count collect(const byte *restrict x, count lo, count hi, uint32_t least, byte *restrict indices,
                     byte *restrict bits, count found, count room)
{
    for (count i = lo; i < hi; i++) {
        if ((load32(x, i) & MAGNITUDE) < least) continue;
        if (found < room) {
            store32(indices, found, (uint32_t)i);
            store32(bits, found, load32(x, i));
        }
        found++;
    }
    return found;
}

/* Most lanes' largest is too small: they are passed over at once. */
static count find(const byte *restrict x, count n, uint32_t least, byte *restrict indices, byte *restrict bits, count room)
{
    count found = 0, whole = n - n % LANES;
    for (count lo = 0; lo < whole; lo += LANES) {
        uint32_t most = 0;
        for (int lane = 0; lane < LANES; lane++) most = larger(most, load32(x, lo + lane) & MAGNITUDE);
        if (most >= least) found = collect(x, lo, lo + LANES, least, indices, bits, found, room);
    }
    return collect(x, whole, n, least, indices, bits, found, room);
}

/* How many were put before a place that is in an earlier block, or beyond the end. */
static count put(const byte *restrict indices, const byte *restrict values, count chosen, byte *restrict out, count n)
{
    count next = 0;
    for (count lo = 0; lo < n; lo += CLEARED) {
        count here = least_of(CLEARED, n - lo);
        memset(out + 4 * lo, 0, (size_t)(4 * here));
        for (; next < chosen && load64(indices, next) - (uint64_t)lo < (uint64_t)here; next++)
            store32(out, (count)load64(indices, next), load32(values, next));
    }
    return next;
}
