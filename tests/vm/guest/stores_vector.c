/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Stores of the FPU, SSE, AVX and of the processor's state.
 */
#include "stores.h"

#include <cpuid.h>

#define XMM(FROM) "movdqu (%[from]), %%xmm1; movdqu 16(%[from]), %%xmm2; " FROM
#define YMM(FROM) "vmovdqu (%[from]), %%ymm1; vmovdqu 32(%[from]), %%ymm2; " FROM

STORE(movd, "movd %k[a], %%xmm1; movd %%xmm1, (%[to])", "xmm1")
STORE(movq, "movq %[a], %%xmm1; movq %%xmm1, (%[to])", "xmm1")
STORE(movss, XMM("movss %%xmm1, (%[to])"), "xmm1", "xmm2")
STORE(movups, XMM("movups %%xmm1, (%[to])"), "xmm1", "xmm2")
STORE(movaps, XMM("movaps %%xmm1, (%[to])"), "xmm1", "xmm2")
STORE(movdqu, XMM("movdqu %%xmm1, (%[to]); movdqu %%xmm2, 16(%[to])"), "xmm1", "xmm2")
STORE(movhps, XMM("movhps %%xmm1, (%[to]); movlps %%xmm2, 8(%[to])"), "xmm1", "xmm2")
STORE(movntps, XMM("movntps %%xmm1, (%[to]); sfence"), "xmm1", "xmm2")
STORE(movntdq, XMM("movntdq %%xmm1, (%[to]); movntdq %%xmm2, 16(%[to]); sfence"), "xmm1", "xmm2")
STORE(pextrd, XMM("pextrd $2, %%xmm1, (%[to]); pextrb $7, %%xmm1, 4(%[to])"), "xmm1", "xmm2")
/* to (%rdi), the bytes that xmm2 says */
STORE(maskmovdqu, XMM("maskmovdqu %%xmm2, %%xmm1; sfence"), "xmm1", "xmm2")
STORE(stmxcsr, "stmxcsr (%[to])")
STORE(movq_mmx, "movq %[a], %%mm0; movq %%mm0, (%[to]); emms", "mm0")
STORE(movntq_mmx, "movq %[a], %%mm0; movntq %%mm0, (%[to]); emms; sfence", "mm0")
STORE(fst64, "fninit; fldpi; fstpl (%[to])")
STORE(fst80, "fninit; fldpi; fstpt (%[to])")
STORE(fist64, "fninit; fldpi; fistpll (%[to])")
STORE(fnstcw, "fninit; fnstcw (%[to])")
/*
 * What the FPU remembers of its last instruction does not survive a task switch on every processor:
 * it is overwritten.
 */
#define FORGET(AT) "movq $0, " #AT "(%[to]); movq $0, " #AT "+8(%[to])"
STORE(fnstenv, "fninit; fnstenv (%[to]); " FORGET(12))
STORE(fnsave, "fninit; fldpi; fnsave (%[to]); " FORGET(12))
STORE(vmovdqu, YMM("vmovdqu %%ymm1, (%[to]); vmovdqu %%ymm2, 32(%[to]); vzeroupper"), "xmm1", "xmm2")
STORE(vmovaps, YMM("vmovaps %%ymm1, (%[to]); vzeroupper"), "xmm1", "xmm2")
STORE(vmovntdq, YMM("vmovntdq %%ymm1, (%[to]); vzeroupper; sfence"), "xmm1", "xmm2")
STORE(vmaskmovps, YMM("vmaskmovps %%ymm1, %%ymm2, (%[to]); vzeroupper"), "xmm1", "xmm2")
STORE(vextractf128, YMM("vextractf128 $1, %%ymm1, (%[to]); vzeroupper"), "xmm1", "xmm2")
STORE(vpmaskmovq, YMM("vpmaskmovq %%ymm1, %%ymm2, (%[to]); vzeroupper"), "xmm1", "xmm2")

/* All of a state is given, so that the compiler's use of the registers does not show. */
#define CLEAR_XMM "pxor %%xmm0, %%xmm0; pxor %%xmm1, %%xmm1; pxor %%xmm2, %%xmm2; pxor %%xmm3, %%xmm3; pxor %%xmm4, %%xmm4; " \
    "pxor %%xmm5, %%xmm5; pxor %%xmm6, %%xmm6; pxor %%xmm7, %%xmm7; pxor %%xmm8, %%xmm8; pxor %%xmm9, %%xmm9; " \
    "pxor %%xmm10, %%xmm10; pxor %%xmm11, %%xmm11; pxor %%xmm12, %%xmm12; pxor %%xmm13, %%xmm13; pxor %%xmm14, %%xmm14; " \
    "pxor %%xmm15, %%xmm15; "
#define ALL_XMM "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
    "xmm14", "xmm15"

STORE(fxsave, "fninit; " CLEAR_XMM XMM("fxsave64 (%[to]); " FORGET(8)), ALL_XMM)
STORE(xsave, "fninit; vzeroall; " YMM("mov $7, %%eax; xor %%edx, %%edx; xsave64 (%[to]); vzeroupper; " FORGET(8)), "rax", "rdx", ALL_XMM)

static int has(unsigned leaf, int number, unsigned bit)
{
    unsigned regs[4];

    return __get_cpuid_count(leaf, 0, &regs[0], &regs[1], &regs[2], &regs[3]) && regs[number] >> bit & 1;
}

static int has_sse41(void)
{
    return has(1, 2, 19);
}

static int has_avx(void)
{
    return has(1, 2, 28) && has(1, 2, 27);      /* the kernel has enabled it, too */
}

static int has_avx2(void)
{
    return has_avx() && has(7, 1, 5);
}

#define KIND(NAME, SPAN, ALIGN, NEED) { #NAME, NAME, SPAN, ALIGN, NEED }

const struct store_kind vector_kinds[] = {
    KIND(movd, 4, 1, NULL), KIND(movq, 8, 1, NULL), KIND(movss, 4, 1, NULL), KIND(movups, 16, 1, NULL), KIND(movaps, 16, 16, NULL),
    KIND(movdqu, 32, 1, NULL), KIND(movhps, 16, 1, NULL), KIND(movntps, 16, 16, NULL), KIND(movntdq, 32, 16, NULL),
    KIND(pextrd, 5, 1, has_sse41), KIND(maskmovdqu, 16, 1, NULL), KIND(stmxcsr, 4, 1, NULL), KIND(movq_mmx, 8, 1, NULL),
    KIND(movntq_mmx, 8, 8, NULL), KIND(fst64, 8, 1, NULL), KIND(fst80, 10, 1, NULL), KIND(fist64, 8, 1, NULL), KIND(fnstcw, 2, 1, NULL),
    KIND(fnstenv, 28, 1, NULL), KIND(fnsave, 108, 1, NULL), KIND(vmovdqu, 64, 1, has_avx), KIND(vmovaps, 32, 32, has_avx),
    KIND(vmovntdq, 32, 32, has_avx), KIND(vmaskmovps, 32, 1, has_avx), KIND(vextractf128, 16, 1, has_avx),
    KIND(vpmaskmovq, 32, 1, has_avx2), KIND(fxsave, 512, 16, NULL), KIND(xsave, 832, 64, has_avx),
};
const size_t vector_kinds_count = COUNT(vector_kinds);
