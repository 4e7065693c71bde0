// SPDX-License-Identifier: Apache-2.0
// All that depends on the processor's family, and the only preprocessor switches of the core.
//
// COMMLIB_CLONES on a function compiles it once for every instruction set that helps and picks one when the library is
// loaded: dispatch and fallback are one source. The pick is an ifunc, which runs before a sanitizer's runtime is ready;
// builds with sanitizers define COMMLIB_NO_CLONES and take the instruction set from the command line.
#pragma once

#include <features.h>

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(COMMLIB_NO_CLONES)
#define COMMLIB_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define COMMLIB_CLONES
#endif

#if defined(__x86_64__)

#include <immintrin.h>

#define COMMLIB_HALF __attribute__((target("avx2,f16c")))
#define COMMLIB_WIDE_HALF __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl")))

namespace commlib {

// Tells the processor that this is a spin loop.
inline void cpu_relax() noexcept { _mm_pause(); }

inline constexpr bool kIsX86 = true;

// The thread's floating-point modes (rounding, traps, flushing of subnormals), and those every thread is born with.
inline constexpr std::uint32_t kDefaultFloatModes = 0x1F80;
[[nodiscard]] inline std::uint32_t float_modes() noexcept { return _mm_getcsr() & ~std::uint32_t{0x3F}; }
inline void set_float_modes(std::uint32_t modes) noexcept { _mm_setcsr(modes); }

// Sixteen 16-bit floats (float16: halves, bfloat16: brains) to float32, and back to nearest even with every NaN the
// same. In functions that are COMMLIB_HALF, and run only where it is supported. Any
// alignment.
struct HalfChunk {
  [[nodiscard]] static bool is_supported() noexcept {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  }

  COMMLIB_HALF static inline void copy_floats(void* to, const void* from) noexcept {
    const auto* const numbers = static_cast<const float*>(from);
    _mm256_storeu_ps(static_cast<float*>(to), _mm256_loadu_ps(numbers));
    _mm256_storeu_ps(static_cast<float*>(to) + 8, _mm256_loadu_ps(numbers + 8));
  }

  COMMLIB_HALF static inline void load_halves(float* to, const void* from) noexcept {
    const auto* const halves = static_cast<const __m128i_u*>(from);
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(halves)));
    _mm256_storeu_ps(to + 8, _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
  }

  COMMLIB_HALF static inline __m128i narrowed_to_halves(__m256 numbers) noexcept {
    const __m256 is_nan = _mm256_cmp_ps(numbers, numbers, _CMP_UNORD_Q);
    const __m256 checked = _mm256_blendv_ps(numbers, _mm256_set1_ps(__builtin_nanf("")), is_nan);
    return _mm256_cvtps_ph(checked, _MM_FROUND_TO_NEAREST_INT);
  }
  COMMLIB_HALF static inline void store_halves(void* to, const float* from) noexcept {
    auto* const halves = static_cast<__m128i_u*>(to);
    _mm_storeu_si128(halves, narrowed_to_halves(_mm256_loadu_ps(from)));
    _mm_storeu_si128(halves + 1, narrowed_to_halves(_mm256_loadu_ps(from + 8)));
  }

  COMMLIB_HALF static inline void load_brains(float* to, const void* from) noexcept {
    const auto* const brains = static_cast<const __m128i_u*>(from);
    for (int i = 0; i < 2; ++i) {
      const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(brains + i)), 16);
      _mm256_storeu_ps(to + 8 * i, _mm256_castsi256_ps(wide));
    }
  }

  // As Bfloat16::of (reduce/half.hpp), in the low halves of eight words.
  COMMLIB_HALF static inline __m256i narrowed_to_brains(__m256 numbers) noexcept {
    const __m256i wide = _mm256_castps_si256(numbers);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(wide, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256 is_nan = _mm256_cmp_ps(numbers, numbers, _CMP_UNORD_Q);
    const __m256 checked = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_set1_ps(__builtin_nanf("")), is_nan);
    return _mm256_srli_epi32(_mm256_castps_si256(checked), 16);
  }
  COMMLIB_HALF static inline void store_brains(void* to, const float* from) noexcept {
    const __m256i low = narrowed_to_brains(_mm256_loadu_ps(from));
    const __m256i high = narrowed_to_brains(_mm256_loadu_ps(from + 8));
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);  // undoes the packing by lanes
    _mm256_storeu_si256(static_cast<__m256i_u*>(to), both);
  }
};

// The same in one register, in functions that are COMMLIB_WIDE_HALF: with half as many instructions they keep up with the
// memory, which the others do not quite.
struct WideHalfChunk {
  static constexpr __mmask16 kAll = 0xFFFF;  // without a mask gcc 12 warns of the undefined value that it begins with

  [[nodiscard]] static bool is_supported() noexcept {
    return HalfChunk::is_supported() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
  }

  COMMLIB_WIDE_HALF static inline void copy_floats(void* to, const void* from) noexcept {
    _mm512_storeu_ps(to, _mm512_loadu_ps(from));
  }

  COMMLIB_WIDE_HALF static inline void load_halves(float* to, const void* from) noexcept {
    _mm512_storeu_ps(to, _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(static_cast<const __m256i_u*>(from))));
  }
  COMMLIB_WIDE_HALF static inline void store_halves(void* to, const float* from) noexcept {
    const __m512 numbers = _mm512_loadu_ps(from);
    const __m512 checked = numbers == numbers ? numbers : __m512{} + __builtin_nanf("");
    _mm256_storeu_si256(static_cast<__m256i_u*>(to), _mm512_maskz_cvtps_ph(kAll, checked, _MM_FROUND_TO_NEAREST_INT));
  }

  COMMLIB_WIDE_HALF static inline void load_brains(float* to, const void* from) noexcept {
    const __m256i brains = _mm256_loadu_si256(static_cast<const __m256i_u*>(from));
    const Words wide = reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(kAll, brains)) << 16;
    __builtin_memcpy(to, &wide, sizeof wide);
  }
  COMMLIB_WIDE_HALF static inline void store_brains(void* to, const float* from) noexcept {
    const __m512 numbers = _mm512_loadu_ps(from);
    const auto wide = reinterpret_cast<Words>(numbers);
    const Words rounded = wide + 0x7FFF + (wide >> 16 & 1);
    const Words checked = (numbers == numbers ? rounded : Words{} + 0x7FC0'0000) >> 16;
    const __m256i brains = _mm512_maskz_cvtepi32_epi16(kAll, reinterpret_cast<__m512i>(checked));
    _mm256_storeu_si256(static_cast<__m256i_u*>(to), brains);
  }

 private:
  using Words [[gnu::vector_size(64)]] = std::uint32_t;
};

}  // namespace commlib

#elif defined(__aarch64__)

#define COMMLIB_HALF
#define COMMLIB_WIDE_HALF

namespace commlib {

inline void cpu_relax() noexcept { __asm__("yield"); }  // no outputs: never optimised away

inline constexpr bool kIsX86 = false;

inline constexpr std::uint32_t kDefaultFloatModes = 0;
[[nodiscard]] inline std::uint32_t float_modes() noexcept { return __builtin_aarch64_get_fpcr(); }
inline void set_float_modes(std::uint32_t modes) noexcept { __builtin_aarch64_set_fpcr(modes); }

// The portable conversion is vectorised well enough here.
struct HalfChunk {
  [[nodiscard]] static bool is_supported() noexcept { return false; }
  static void copy_floats(void*, const void*) noexcept {}
  static void load_halves(float*, const void*) noexcept {}
  static void store_halves(void*, const float*) noexcept {}
  static void load_brains(float*, const void*) noexcept {}
  static void store_brains(void*, const float*) noexcept {}
};
using WideHalfChunk = HalfChunk;

}  // namespace commlib

#else
#error "commlib knows x86-64 and AArch64"
#endif
