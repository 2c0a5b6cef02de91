// zlib's crc32, by carry-less products where the CPU has them: V. Gopal et al., "Fast CRC computation for generic polynomials using
// PCLMULQDQ", Intel 2009; the constants are its appendix's for this polynomial.
#include <array>
#include <cstring>

#include "block_io.h"
#include "types.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define KTOPT_FOLDS 1
#endif

namespace ktopt {
namespace {

constexpr uint32_t POLYNOMIAL = 0xedb88320;
using Tables = std::array<std::array<uint32_t, 256>, 8>;

// Table t has what a byte does to the checksum t bytes later.
Tables make_tables() {
    Tables made{};
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        made[0][byte] = crc;
    }
    for (size_t t = 1; t < made.size(); t++)
        for (size_t byte = 0; byte < 256; byte++) made[t][byte] = made[t - 1][byte] >> 8 ^ made[0][made[t - 1][byte] & 255];
    return made;
}

uint32_t by_tables(uint32_t crc, const uint8_t* data, size_t n) {
    static const Tables tables = make_tables();
    for (; n >= 8; data += 8, n -= 8) {
        const uint32_t low = crc ^ (data[0] | data[1] << 8 | data[2] << 16 | uint32_t(data[3]) << 24);
        crc = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255] ^ tables[4][low >> 24] ^
              tables[3][data[4]] ^ tables[2][data[5]] ^ tables[1][data[6]] ^ tables[0][data[7]];
    }
    for (; n > 0; data++, n--) crc = crc >> 8 ^ tables[0][(crc ^ *data) & 255];
    return crc;
}

#ifdef KTOPT_FOLDS
#define KTOPT_FOLDING __attribute__((target("pclmul,sse4.1")))

KTOPT_FOLDING __m128i load(const uint8_t* data) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)); }

// x moved on by as many bits as the constants are for, and what stands there.
KTOPT_FOLDING __m128i fold(__m128i x, __m128i constants, __m128i there) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, constants, 0x00), _mm_clmulepi64_si128(x, constants, 0x11)), there);
}

// Of at least 64 bytes, a multiple of 16.
KTOPT_FOLDING uint32_t by_folding(uint32_t crc, const uint8_t* data, size_t n) {
    const __m128i by_512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by_128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(int(crc))), b = load(data + 16), c = load(data + 32), d = load(data + 48);
    for (data += 64, n -= 64; n >= 64; data += 64, n -= 64) {
        a = fold(a, by_512, load(data));
        b = fold(b, by_512, load(data + 16));
        c = fold(c, by_512, load(data + 32));
        d = fold(d, by_512, load(data + 48));
    }
    a = fold(fold(fold(a, by_128, b), by_128, c), by_128, d);
    for (; n >= 16; data += 16, n -= 16) a = fold(a, by_128, load(data));
    const __m128i low = _mm_setr_epi32(-1, 0, -1, 0), to_32 = _mm_set_epi64x(0, 0x0163cd6124);
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_128, 0x10));
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low), to_32, 0x00));
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);  // the quotient's and the polynomial itself
    __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(a, low), barrett, 0x10);
    quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low), barrett, 0x00);
    return uint32_t(_mm_extract_epi32(_mm_xor_si128(a, quotient), 1));
}

bool folds() {
    static const bool has = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    return has && std::strcmp(kernels().name, "scalar") != 0;
}
#endif

}  // namespace

uint32_t crc32(uint32_t begun, const uint8_t* data, size_t n) {
    uint32_t crc = ~begun;
#ifdef KTOPT_FOLDS
    if (n >= 64 && folds()) {
        const size_t whole = n & ~size_t(15);
        crc = by_folding(crc, data, whole);
        data += whole;
        n -= whole;
    }
#endif
    return ~by_tables(crc, data, n);
}

}  // namespace ktopt
