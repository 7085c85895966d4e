/* Peaks of a processor, on all threads: "probe NAME..." prints "NAME value" for each, the best of
 * several short runs. Unit: 10^9 operations per second, two for a multiply-add; read:BYTES: 10^9
 * bytes per second, reading a buffer of that size. */
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RUNS 7
#define CHAINS 12 /* independent sums, enough to hide the latency of an instruction */
#define EACH _Pragma("GCC unroll 12") for (int k = 0; k < CHAINS; k++)

static volatile int three = 3; /* not known to the compiler */
static volatile double sink;
static __m256i *buffer;

#define PEAK(name, isa, type, ones, next)                       \
  __attribute__((target(isa))) static void name(size_t turns) { \
    type sum[CHAINS], a = ones(three);                          \
    EACH sum[k] = ones(three + k);                              \
    while (turns--) EACH sum[k] = next;                         \
    EACH sink = sum[k][0];                                      \
  }
PEAK(avx2, "avx2,fma", __m256, _mm256_set1_ps, _mm256_fmadd_ps(sum[k], a, a))
PEAK(avx512, "avx512f", __m512, _mm512_set1_ps, _mm512_fmadd_ps(sum[k], a, a))
PEAK(avx512_bf16, "avx512bf16", __m512, _mm512_set1_ps,
     _mm512_dpbf16_ps(sum[k], (__m512bh)a, (__m512bh)a))
PEAK(avx2_int16, "avx2", __m256i, _mm256_set1_epi32,
     _mm256_add_epi32(_mm256_madd_epi16(sum[k], a), a))
PEAK(avx512_int16, "avx512bw", __m512i, _mm512_set1_epi32,
     _mm512_add_epi32(_mm512_madd_epi16(sum[k], a), a))
PEAK(avx_vnni, "avxvnni", __m256i, _mm256_set1_epi32, _mm256_dpbusd_avx_epi32(sum[k], a, a))
PEAK(avx512_vnni, "avx512vnni", __m512i, _mm512_set1_epi32, _mm512_dpbusd_epi32(sum[k], a, a))

#define TILES(name, isa, product)                                             \
  __attribute__((target("amx-tile," isa))) static void name(size_t turns) {   \
    uint8_t shape[64] = {1}; /* palette; 64 bytes and 16 rows of each tile */ \
    for (int t = 0; t < 8; t++) shape[16 + 2 * t] = 64, shape[48 + t] = 16;   \
    syscall(SYS_arch_prctl, 0x1023, 18); /* permission to use tiles */        \
    _tile_loadconfig(shape);                                                  \
    while (turns--) {                                                         \
      product(0, 4, 6);                                                       \
      product(1, 4, 7);                                                       \
      product(2, 5, 6);                                                       \
      product(3, 5, 7);                                                       \
    }                                                                         \
    _tile_release();                                                          \
  }
TILES(amx_bf16, "amx-bf16", _tile_dpbf16ps)
TILES(amx_int8, "amx-int8", _tile_dpbusd)

__attribute__((target("avx2"))) static void read_slice(size_t count) {
  __m256i sum[CHAINS] = {0}, *mine = buffer + omp_get_thread_num() * count;
  for (size_t i = 0; i + CHAINS <= count; i += CHAINS) EACH sum[k] += mine[i + k];
  EACH sink = sum[k][0];
}

static double best(void (*run)(size_t), size_t turns, double each) {
  double rate = 0;
  for (int i = 0; i < RUNS; i++) {
    double begin = omp_get_wtime();
#pragma omp parallel
    run(turns);
    double found = each * turns * omp_get_max_threads() / (omp_get_wtime() - begin) / 1e9;
    rate = found > rate ? found : rate;
  }
  return rate;
}

int main(int count, char **names) {
  for (int i = 1; i < count; i++) {
#define TRY(name, operations) \
  if (!strcmp(names[i], #name)) printf(#name " %.3f\n", best(name, 1 << 22, operations))
    TRY(avx2, CHAINS * 8 * 2.);
    TRY(avx512, CHAINS * 16 * 2.);
    TRY(avx512_bf16, CHAINS * 32 * 2.);
    TRY(avx2_int16, CHAINS * 16 * 2.);
    TRY(avx512_int16, CHAINS * 32 * 2.);
    TRY(avx_vnni, CHAINS * 32 * 2.);
    TRY(avx512_vnni, CHAINS * 64 * 2.);
    TRY(amx_bf16, 4 * 16 * 16 * 32 * 2.);
    TRY(amx_int8, 4 * 16 * 16 * 64 * 2.);
    if (strncmp(names[i], "read:", 5)) continue;
    size_t huge = 1 << 21, bytes = (strtoull(names[i] + 5, 0, 10) / huge + 1) * huge;
    buffer = aligned_alloc(huge, bytes);
    madvise(buffer, bytes, MADV_HUGEPAGE);
    memset(buffer, 1, bytes);
    printf("%s %.3f\n", names[i], best(read_slice, bytes / 32 / omp_get_max_threads(), 32));
    free(buffer);
  }
}
