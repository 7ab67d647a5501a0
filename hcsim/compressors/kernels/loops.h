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

/* What the compiler would not vectorise as well is written four elements at a time, in loops that leave no loop. */
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif
typedef uint32_t four __attribute__((vector_size(16)));

static inline four load_four(const byte *at, count i) { four v; memcpy(&v, at + 4 * i, 16); return v; }
static inline void store_four(byte *at, count i, four v) { memcpy(at + 4 * i, &v, 16); }

/* A NaN or an infinity leaves a trace, in the sign: its exponent is full, and 1 more overflows. Where the processor has an
   instruction for it, 0 times the number is added, which makes a NaN of the sum. */
static inline four overflow(four bits) { return (bits & INFINITE) + (1u << 23); }
#if defined(__aarch64__)
static inline four leave_trace(four trace, four bits)
{
    return (four)vfmaq_f32((float32x4_t)trace, (float32x4_t)bits, vdupq_n_f32(0));
}
static inline four trace_left(four trace) { return overflow(trace); }
#else
static inline four leave_trace(four trace, four bits) { return trace | overflow(bits); }
static inline four trace_left(four trace) { return trace; }
#endif
static inline int are_finite(const four *trace)
{
    four all = trace_left(trace[0]) | trace_left(trace[1]) | trace_left(trace[2]) | trace_left(trace[3]);
    return !((all[0] | all[1] | all[2] | all[3]) >> 31);
}

#define AHEAD 768  /* bytes; told so far before what it will need, a processor reads memory a little faster */
static inline void expect(const byte *x) { __builtin_prefetch(x + AHEAD), __builtin_prefetch(x + AHEAD + 64); }

/* ---- From every element one: each gives the largest magnitude that it met. ---- */

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

/* By whole lines of the cache, as quick as memcpy. Of most elements it only says whether they are finite. */
static uint32_t copy(const byte *restrict x, byte *restrict out, count n)
{
    count i = least_of(n, (count)((0 - (uintptr_t)out) % 64 / 4));
    uint32_t most = copy_few(x, out, i);
    four trace[4] = {{0}};
    for (; i + 32 <= n; i += 32) {
        four some[8];
        expect(x + 4 * i);
        UNROLLED for (int j = 0; j < 8; j++) some[j] = load_four(x, i + 4 * j);
        UNROLLED for (int j = 0; j < 8; j++) store_four(out, i + 4 * j, some[j]);
        UNROLLED for (int j = 0; j < 8; j++) trace[j % 4] = leave_trace(trace[j % 4], some[j]);
    }
    most = larger(most, copy_few(x + 4 * i, out + 4 * i, n - i));
    return are_finite(trace) ? most : INFINITE;
}

static uint32_t to_bf16(const byte *restrict x, byte *restrict out, count n)
{
    uint32_t most = 0;
    for (count i = 0; i < n; i++) {
        uint32_t bits = load32(x, i);
        most = larger(most, bits & MAGNITUDE);
        store16(out, i, (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16));
    }
    return most;
}

static uint32_t from_bf16(const byte *restrict x, byte *restrict out, count n)
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
static uint32_t to_fp16(const byte *restrict x, byte *restrict out, count n)
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

static uint32_t from_fp16(const byte *restrict x, byte *restrict out, count n)
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
