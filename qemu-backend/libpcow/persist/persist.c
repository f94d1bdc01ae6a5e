/* SPDX-License-Identifier: BSD-3-Clause */
#include "persist/persist.h"

#include <cpuid.h>
#include <errno.h>
#include <immintrin.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef HUGETLBFS_MAGIC
#define HUGETLBFS_MAGIC 0x958458f6
#endif

#define CACHE_LINE 64u

#define DEFINE_FLUSH(name, target_attribute, instruction)                                                        \
    static target_attribute void name(const void *address, size_t length)                                        \
    {                                                                                                            \
        uintptr_t line = (uintptr_t)address & ~(uintptr_t)(CACHE_LINE - 1);                                      \
                                                                                                                 \
        for (; line < (uintptr_t)address + length; line += CACHE_LINE)                                           \
            instruction((void *)line);                                                                           \
    }

DEFINE_FLUSH(flush_clwb, __attribute__((target("clwb"))), _mm_clwb)
DEFINE_FLUSH(flush_clflushopt, __attribute__((target("clflushopt"))), _mm_clflushopt)
DEFINE_FLUSH(flush_clflush, , _mm_clflush)

void persist_init(struct persist *persist, enum pcow_persistence persistence)
{
    unsigned eax, ebx = 0, ecx, edx;

    persist->persistence = persistence;
    /* CPUID leaf 7: EBX bit 24 clwb, bit 23 clflushopt. clwb leaves the line in the cache, so it comes first. */
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        ebx = 0;
    if (ebx & 1u << 24)
        persist->flush_lines = flush_clwb;
    else if (ebx & 1u << 23)
        persist->flush_lines = flush_clflushopt;
    else
        persist->flush_lines = flush_clflush;
}

enum pcow_persistence persist_classify(int fd)
{
    struct statfs fs;
    void *probe;

    if (fstatfs(fd, &fs) == 0
        && ((uint32_t)fs.f_type == TMPFS_MAGIC || (uint32_t)fs.f_type == HUGETLBFS_MAGIC || (uint32_t)fs.f_type == RAMFS_MAGIC))
        return PCOW_PERSISTENCE_VOLATILE;
    /* The kernel refuses MAP_SYNC with EOPNOTSUPP unless the file is on DAX, so success is the proof. */
    probe = mmap(NULL, PCOW_PAGE_SIZE, PROT_READ, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
    if (probe == MAP_FAILED)
        return PCOW_PERSISTENCE_PAGE_CACHE;
    munmap(probe, PCOW_PAGE_SIZE);
    return PCOW_PERSISTENCE_PMEM;
}

int persist_range(const struct persist *persist, const void *address, size_t length)
{
    switch (persist->persistence) {
    case PCOW_PERSISTENCE_PMEM:
        persist->flush_lines(address, length);
        _mm_sfence();
        return 0;
    case PCOW_PERSISTENCE_PAGE_CACHE: {
        uintptr_t page = (uintptr_t)address & ~(uintptr_t)(PCOW_PAGE_SIZE - 1);

        return msync((void *)page, (uintptr_t)address + length - page, MS_SYNC) ? -errno : 0;
    }
    case PCOW_PERSISTENCE_VOLATILE:
        break;
    }
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    return 0;
}

void persist_fence(const struct persist *persist)
{
    if (persist->persistence == PCOW_PERSISTENCE_PMEM)
        _mm_sfence();
    /* Elsewhere x86 keeps the order of stores by itself; only the compiler must. */
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

int persist_store64(const struct persist *persist, uint64_t *where, uint64_t value)
{
    __atomic_store_n(where, value, __ATOMIC_RELEASE);
    return persist_range(persist, where, sizeof *where);
}

void persist_copy(const struct persist *persist, void *to, const void *from, size_t length)
{
    if (persist->persistence != PCOW_PERSISTENCE_PMEM || (uintptr_t)to % 16 || (uintptr_t)from % 16 || length % 64) {
        memcpy(to, from, length);
        if (persist->persistence == PCOW_PERSISTENCE_PMEM)
            persist->flush_lines(to, length);
        return;
    }
    /* Whole lines written with non-temporal stores cost half of copy + clwb and leave the cache to the guest. */
    for (size_t i = 0; i < length; i += 64) {
        const __m128i *source = (const __m128i *)((const char *)from + i);
        __m128i *target = (__m128i *)((char *)to + i);

        _mm_stream_si128(target, _mm_load_si128(source));
        _mm_stream_si128(target + 1, _mm_load_si128(source + 1));
        _mm_stream_si128(target + 2, _mm_load_si128(source + 2));
        _mm_stream_si128(target + 3, _mm_load_si128(source + 3));
    }
}
