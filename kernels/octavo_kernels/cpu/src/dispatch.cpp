#include "dispatch.h"

#include <cpuid.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace octavo {

namespace avx2 { const Kernels* kernels(); }
namespace avx512 { const Kernels* kernels(); }
namespace amx { const Kernels* kernels(); }

namespace {

// State that the operating system saves and restores, from the extended control register 0.
uint64_t enabled_state() {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

struct Features {
    bool avx2 = false, avx512 = false, amx = false;
};

// Bits as in the Intel Architecture Instruction Set Extensions manual, CPUID leaves 1 and 7.
Features detect() {
    Features found;
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    const bool fma = c >> 12 & 1, xsave = c >> 27 & 1, f16c = c >> 29 & 1;
    if (!xsave || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    const uint64_t state = enabled_state();
    const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state & 0x60000) == 0x60000;
    found.avx2 = fma && f16c && (b >> 5 & 1) && ymm;
    const bool f = b >> 16 & 1, vnni = c >> 11 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1;
    const bool tile = d >> 24 & 1, tile_bf16 = d >> 22 & 1;
    const bool more = a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d);
    found.avx512 = found.avx2 && f && dq && bw && vl && vnni && zmm && more && (a >> 5 & 1);    // the last: bfloat16
    found.amx = found.avx512 && tile && tile_bf16 && tiles;
    return found;
}

// Tile state is large, so Linux wants to be asked for it, once a process.
bool request_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;    // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

const Kernels* choose_kernels(const char* isa) {
    const Features found = detect();
    const auto wanted = [isa](const char* name) { return !isa || strcmp(isa, name) == 0; };
    if (found.amx && wanted("amx") && request_tiles()) return amx::kernels();
    if (found.avx512 && wanted("avx512")) return avx512::kernels();
    if (found.avx2 && wanted("avx2")) return avx2::kernels();
    return nullptr;
}

}  // namespace octavo
