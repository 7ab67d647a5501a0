/* Floats to halves and back with AVX2: what a compiler makes of the loops waits for memory more than it needs to.

   Each takes LINES elements at a time, and gives the largest magnitude that it met. */

static inline wide larger_wide(wide a, wide b) { return (wide)_mm256_max_epu32((__m256i)a, (__m256i)b); }

static inline uint32_t largest_of_wide(wide most)
{
    uint32_t result = 0;
    for (int lane = 0; lane < WIDE; lane++) result = larger(result, most[lane]);
    return result;
}

static inline wide rounded_to_bf16(wide bits) { return (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16; }

static inline wide as_bf16(wide a, wide b)
{
    __m256i packed = _mm256_packus_epi32((__m256i)rounded_to_bf16(a), (__m256i)rounded_to_bf16(b));
    return (wide)_mm256_permute4x64_epi64(packed, 0xD8); /* packed within each half of the register */
}

static inline wide as_fp16(wide a, wide b)
{
    return (wide)_mm256_set_m128i(_mm256_cvtps_ph((__m256)b, _MM_FROUND_TO_NEAREST_INT),
                                  _mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT));
}

static inline __m128i load_halves(const byte *at) { return _mm_loadu_si128((const __m128i *)at); }
static inline wide of_bf16(__m128i halves) { return (wide)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16); }
static inline wide of_fp16(__m128i halves) { return (wide)_mm256_cvtph_ps(halves); }

#define NARROWING(to)                                                                                     \
    static uint32_t to_##to##_many(const byte *restrict x, byte *restrict out, count n)                   \
    {                                                                                                     \
        wide most = {0};                                                                                  \
        int far = is_far(out, 2 * n);                                                                     \
        for (count i = 0; i < n; i += LINES) {                                                            \
            expect(x + 4 * i);                                                                            \
            UNROLLED for (int j = 0; j < LINES; j += 2 * WIDE) {                                          \
                wide a = load_wide(x, i + j), b = load_wide(x, i + j + WIDE);                             \
                most = larger_wide(most, larger_wide(a & MAGNITUDE, b & MAGNITUDE));                      \
                put_wide(out + 2 * (i + j), as_##to(a, b), far);                                          \
            }                                                                                             \
        }                                                                                                 \
        settle(far);                                                                                      \
        return largest_of_wide(most);                                                                     \
    }

/* A half's magnitude is told in the terms of its format, as the loops for a few tell it. */
#define WIDENING(from, magnitude)                                                                         \
    static uint32_t from_##from##_many(const byte *restrict x, byte *restrict out, count n)               \
    {                                                                                                     \
        wide most = {0};                                                                                  \
        int far = is_far(out, 4 * n);                                                                     \
        for (count i = 0; i < n; i += LINES) {                                                            \
            __builtin_prefetch(x + 2 * i + AHEAD);                                                        \
            UNROLLED for (int j = 0; j < LINES; j += WIDE) {                                              \
                __m128i halves = load_halves(x + 2 * (i + j));                                            \
                most = larger_wide(most, magnitude);                                                      \
                put_wide(out + 4 * (i + j), of_##from(halves), far);                                      \
            }                                                                                             \
        }                                                                                                 \
        settle(far);                                                                                      \
        return largest_of_wide(most);                                                                     \
    }

NARROWING(bf16)
NARROWING(fp16)
WIDENING(bf16, of_bf16(halves) & MAGNITUDE)
WIDENING(fp16, (wide)_mm256_cvtepu16_epi32(halves) & 0x7FFFu)
