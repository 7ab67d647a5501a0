/* Floats of 16 bits, which are added and divided as floats of 32 and rounded once, to the nearest, ties to even. */

#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float x) { uint32_t bits; return memcpy(&bits, &x, sizeof bits), bits; }
static inline float with_bits(uint32_t bits) { float x; return memcpy(&x, &bits, sizeof x), x; }

/* ---- bfloat16: the upper half of a float. ---- */

static inline float of_bf16(uint16_t half) { return with_bits((uint32_t)half << 16); }

static inline uint16_t to_bf16(float x)
{
    uint32_t bits = bits_of(x), rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(x == x ? rounded : (bits >> 16 & 0x8000u) | 0x7FC0u);
}

/* ---- float16 ---- */

#if defined(__aarch64__)
static inline float of_fp16(uint16_t half) { __fp16 x; return memcpy(&x, &half, sizeof x), (float)x; }
static inline uint16_t to_fp16(float x) { __fp16 y = (__fp16)x; uint16_t half; return memcpy(&half, &y, 2), half; }
#else
/* Below 2^-14 they are whole multiples of 2^-24, and so are floats from 0.5 to 1: adding 0.5 rounds to them. */
static inline float of_fp16(uint16_t half)
{
    uint32_t magnitude = half & 0x7FFFu, sign = (uint32_t)(half & 0x8000u) << 16;
    if (magnitude < 0x400u) return with_bits(bits_of(with_bits(magnitude + bits_of(0.5f)) - 0.5f) | sign);
    return with_bits(((magnitude << 13) + (magnitude < 0x7C00u ? 112u << 23 : 224u << 23)) | sign);
}

static inline uint16_t to_fp16(float x)
{
    uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFFu, half;
    if (magnitude < 113u << 23) half = bits_of(with_bits(magnitude) + 0.5f) - bits_of(0.5f);
    else if (magnitude < 0x477FF000u) half = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1)) >> 13;
    else half = magnitude > 0x7F800000u ? 0x7E00u | (magnitude >> 13 & 0x3FFu) : 0x7C00u;
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}
#endif

/* ---- Eight at a time. ---- */

#if defined(__x86_64__)
WITH_AVX2 static inline __m256 wide_of_fp16(const char *at)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}

WITH_AVX2 static inline void wide_to_fp16(char *at, __m256 x)
{
    _mm_storeu_si128((__m128i *)at, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

WITH_AVX2 static inline __m256 wide_of_bf16(const char *at)
{
    __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16));
}

WITH_AVX2 static inline void wide_to_bf16(char *at, __m256 x)
{
    __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    __m256i tie = _mm256_add_epi32(_mm256_set1_epi32(0x7FFF), _mm256_and_si256(high, _mm256_set1_epi32(1)));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, tie), 16);
    __m256i none = _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi32(0x8000)), _mm256_set1_epi32(0x7FC0));
    __m256i is_none = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i halves = _mm256_blendv_epi8(rounded, none, is_none);
    _mm_storeu_si128((__m128i *)at,
                     _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
#endif
