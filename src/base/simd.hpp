// SPDX-License-Identifier: Apache-2.0
// All that depends on the processor's family, and the only preprocessor switches of the core.
//
// COMMLIB_CLONES on a function compiles it once for every instruction set that helps and picks one when the library is
// loaded: dispatch and fallback are one source. The pick is an ifunc, which runs before a sanitizer's runtime is ready;
// builds with sanitizers define COMMLIB_NO_CLONES and take the instruction set from the command line.
#pragma once

#include <features.h>

#include <cstdint>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(COMMLIB_NO_CLONES)
#define COMMLIB_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define COMMLIB_CLONES
#endif

namespace commlib {

#if defined(__x86_64__)

inline constexpr bool kIsX86 = true;

// Tells the core that this is a spin loop.
inline void cpu_relax() noexcept { __builtin_ia32_pause(); }

// The thread's floating-point control word (rounding, flushing of subnormals), and the one every thread is born with.
inline constexpr std::uint32_t kDefaultFloatControl = 0x1F80;
[[nodiscard]] inline std::uint32_t float_control() noexcept { return __builtin_ia32_stmxcsr(); }
inline void set_float_control(std::uint32_t control) noexcept { __builtin_ia32_ldmxcsr(control); }

#elif defined(__aarch64__)

inline constexpr bool kIsX86 = false;

inline void cpu_relax() noexcept { __asm__("yield"); }  // no outputs: never optimised away

inline constexpr std::uint32_t kDefaultFloatControl = 0;
[[nodiscard]] inline std::uint32_t float_control() noexcept { return __builtin_aarch64_get_fpcr(); }
inline void set_float_control(std::uint32_t control) noexcept { __builtin_aarch64_set_fpcr(control); }

#else
#error "commlib knows x86-64 and AArch64"
#endif

}  // namespace commlib
