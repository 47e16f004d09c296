// The vector instructions of emulation.h against those of SIMDe, over random bits. (SIMDe has no tiles.)
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>

#include "emulation.h"

#include <cstdio>
#include <random>

namespace {

std::mt19937 engine(1);
int failed = 0;

template <class To, class From>
To as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To out;
    std::memcpy(&out, &from, sizeof out);
    return out;
}

template <class Vector>
Vector random_bits() {
    std::uint32_t words[sizeof(Vector) / 4];
    for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(engine());
    Vector out;
    std::memcpy(&out, words, sizeof out);
    return out;
}

__m512 random_floats() { return emulation::cvtepi32_ps(random_bits<__m512i>()); }

template <class A, class B>
void expect_same(const A& ours, const B& theirs, const char* what) {
    static_assert(sizeof ours == sizeof theirs);
    if (std::memcmp(&ours, &theirs, sizeof ours) == 0) return;
    ++failed;
    std::printf("%s differs\n", what);
}

#define COMPARE(ours, theirs) expect_same(ours, theirs, #theirs)

void round() {
    using Wide = simde__m512i;
    using Floats = simde__m512;
    const __m512i a = random_bits<__m512i>(), b = random_bits<__m512i>(), c = random_bits<__m512i>();
    const __m256i x = random_bits<__m256i>(), y = random_bits<__m256i>(), z = random_bits<__m256i>();
    const __m512 f = random_floats(), g = random_floats(), h = random_floats();
    const Wide sa = as<Wide>(a), sb = as<Wide>(b), sc = as<Wide>(c);
    const Floats sf = as<Floats>(f), sg = as<Floats>(g), sh = as<Floats>(h);
    COMPARE(_mm256_dpbusd_avx_epi32(x, y, z), simde_mm256_dpbusd_epi32(x, y, z));
    COMPARE(_mm512_dpbusd_epi32(a, b, c), simde_mm512_dpbusd_epi32(sa, sb, sc));
    COMPARE(_mm512_setzero_si512(), simde_mm512_setzero_si512());
    COMPARE(_mm512_set1_epi8(-128), simde_mm512_set1_epi8(-128));
    COMPARE(_mm512_set1_epi32(0x01020384), simde_mm512_set1_epi32(0x01020384));
    COMPARE(_mm512_set1_ps(1.5f), simde_mm512_set1_ps(1.5f));
    COMPARE(_mm512_inserti64x4(a, x, 1), simde_mm512_inserti64x4(sa, x, 1));
    COMPARE(_mm512_extractf64x4_pd(as<__m512d>(a), 1), simde_mm512_extractf64x4_pd(as<simde__m512d>(a), 1));
    COMPARE(_mm512_castps512_ps256(f), simde_mm512_castps512_ps256(sf));
    COMPARE(_mm512_and_si512(a, b), simde_mm512_and_si512(sa, sb));
    COMPARE(_mm512_xor_si512(a, b), simde_mm512_xor_si512(sa, sb));
    COMPARE(_mm512_sub_epi32(a, b), simde_mm512_sub_epi32(sa, sb));
    COMPARE(_mm512_srli_epi16(a, 4), simde_mm512_srli_epi16(sa, 4));
    COMPARE(_mm512_slli_epi32(a, 16), simde_mm512_slli_epi32(sa, 16));
    COMPARE(_mm512_mul_ps(f, g), simde_mm512_mul_ps(sf, sg));
    COMPARE(_mm512_fmadd_ps(f, g, h), simde_mm512_fmadd_ps(sf, sg, sh));
    COMPARE(_mm512_add_ps(f, g), simde_mm512_add_ps(sf, sg));
    COMPARE(_mm512_sub_ps(f, g), simde_mm512_sub_ps(sf, sg));
    COMPARE(_mm512_max_ps(f, g), simde_mm512_max_ps(sf, sg));
    COMPARE(_mm512_min_ps(f, g), simde_mm512_min_ps(sf, sg));
    COMPARE(_mm512_div_ps(f, g), simde_mm512_div_ps(sf, sg));
    COMPARE(_mm512_add_epi32(a, b), simde_mm512_add_epi32(sa, sb));
    COMPARE(_mm512_mask_mov_ps(f, 0x5a3c, g), simde_mm512_mask_mov_ps(sf, 0x5a3c, sg));
    COMPARE(_mm512_maskz_mov_ps(0x5a3c, g), simde_mm512_maskz_mov_ps(0x5a3c, sg));
    COMPARE(_mm512_cmp_ps_mask(f, g, _CMP_NLT_UQ), simde_mm512_cmp_ps_mask(sf, sg, _CMP_NLT_UQ));
}

}  // namespace

int main() {
    for (int i = 0; i < 1000 && !failed; ++i) round();
    return failed ? 1 : 0;
}
