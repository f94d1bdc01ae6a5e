/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Engine "minor": as signal, but a slab in which a guest stores here and there is mapped once, to
 * the file slab in which all of its own pages lie, and registered with userfaultfd. A page in there
 * can be accessed once it was let in. Until then an access is what the kernel calls a minor fault,
 * as the page may be in the page cache and is only not in the page table, or a missing one; with
 * UFFD_FEATURE_SIGBUS both are SIGBUS to the thread that has it. To let a page in (UFFDIO_CONTINUE)
 * takes a fifth of the time of mapping it, cuts no mapping in three, needs only the reader's side
 * of the kernel's lock, so that several threads do not wait for each other, and spares the fault of
 * the store.
 *
 *   page of such a slab                  page table        access
 *   not own: a base's, a snapshot's      no entry          store: is made own and let in; load: the slab is mapped as under signal, or as a store
 *   own, not used since it became so     no entry          is let in
 *   own, used                            writable entry    no trap; if the kernel takes the entry away (swap), it is let in again
 *
 * What a base has cannot be shown there without being copied. So a slab from which something is
 * loaded that is not own is mapped as under signal, and stays so until the next snapshot, or until
 * mappings are short; and if that happens often there are few such slabs (gain). Where there are
 * not as many mappings as that takes, what is loaded is made own: 64 KiB in place of the 2 MiB of a
 * slab that is made whole. After a snapshot the slab goes on so, in the next file slab.
 *
 * System calls cannot trap: they get EFAULT. Who has one access the range has to ask before
 * (pcow_map_resolve()); a slab that was asked for is mapped as under signal, for good. That is why
 * a program has to choose this engine.
 *
 * Class volatile, Linux 5.19: elsewhere there is no such userfaultfd. Descriptors of user mode only
 * need no privilege. Source: Linux, Documentation/admin-guide/mm/userfaultfd.rst, mm/userfaultfd.c,
 * mm/shmem.c.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "monitor/engine_minor.h"
#include "monitor/monitor.h"
#include "monitor/policy.h"

/*
 * Nothing is write-protected so. But where it could be the kernel maps no huge page of the file,
 * which would let in all of a slab: MADV_COLLAPSE (Linux 6.1), by whomever, asks it to, and heeds
 * no other mode (mm/khugepaged.c, collapse_pte_mapped_thp()).
 */
#define NEVER_COLLAPSED UFFDIO_REGISTER_MODE_WP
#define MODES (UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR | NEVER_COLLAPSED)
/* A slab with so many is mapped so, as the first one may be the only; */
#define TRAPS 2u
#define PROVEN 256                     /* or with the first, if so much was gained by such slabs */
#define MOST_LET_IN 16u                /* pages around one that was not used since it became own */
/*
 * Own pages in a row, when a slab comes to be mapped so; of more a guest that stores here and there
 * uses few.
 */
#define LET_IN_AT_ONCE 4u
#define GAIN_AT_FIRST 64               /* traps that took half of the time, */
#define MAX_GAIN 1024
#define COST 2                         /* less what it takes to map a slab so, */
#define LOSS 8                         /* and as under signal after all */
#define SAMPLE 16u                     /* without a gain one slab in so many is tried */

static struct minor *minor_of(const struct pcow_map *map)
{
    return map->of_engine;
}

static int register_range(const struct pcow_map *map, void *address, size_t length)
{
    struct uffdio_register request = {.range = {(uintptr_t)address, length}, .mode = MODES};

    return ioctl(minor_of(map)->fd, UFFDIO_REGISTER, &request) ? -errno : 0;
}

static bool is_active(const struct pcow_image *image, slab_ref slab)
{
    return slab && slab_ref_level(slab) == image->chain->levels
           && image->slabs[slab_ref_slab(slab)].layer == image_active(image);
}

/*
 * The file slab in which all of its own pages lie, and where they have blocks. 0: there is none.
 * The claim is held. While a snapshot is merged into the active layer its slabs go over one after
 * the other, in another order than that of the list.
 */
static uint64_t own_slab(const struct pcow_map *map, uint64_t guest_slab)
{
    const struct pcow_image *image = map->image;
    slab_ref head = image->chain->head[guest_slab];

    if (!is_active(image, head) || !slab_is_backed(image, slab_ref_slab(head)))
        return 0;
    return chain_next_own(image, image->slabs[slab_ref_slab(head)].next) ? 0 : slab_ref_slab(head);
}

static void count_gain(struct pcow_map *map, int by)
{
    int gain = __atomic_load_n(&minor_of(map)->gain, __ATOMIC_RELAXED) + by;

    /* Two threads may count as one here: it is a guess. */
    __atomic_store_n(&minor_of(map)->gain,
                     gain > MAX_GAIN ? MAX_GAIN
                     : gain < -LOSS  ? -LOSS
                                     : gain,
                     __ATOMIC_RELAXED);
}

static bool is_worth_it(struct pcow_map *map)
{
    return __atomic_load_n(&minor_of(map)->gain, __ATOMIC_RELAXED) > 0
           || __atomic_fetch_add(&minor_of(map)->tries, 1, __ATOMIC_RELAXED) % SAMPLE == 0;
}

static bool can_keep(const struct pcow_map *map, uint64_t guest_slab)
{
    const struct slab_map *slab = &map->slabs[guest_slab];

    return slab_is_one_of(&slab->status, SLAB_BIT(SLAB_MAPPED) | SLAB_BIT(SLAB_BOUNCE))
           && !__atomic_load_n(&slab->asked, __ATOMIC_RELAXED)
           && (!slab->loaded || vmas_are_short(map)) && !map->lost
           && !page_set_full(&slab->writable);
}

/*
 * The pages [from, to) of the range, given as guest offsets; those that are in already stay so. 1:
 * there were others.
 */
static int let_in(const struct pcow_map *map, uint64_t from, uint64_t to)
{
    int any = 0;

    while (from < to) {
        struct uffdio_continue request = {
            .range = {(uintptr_t)map->address + from, to - from},
            .mode = UFFDIO_CONTINUE_MODE_DONTWAKE,
        };

        if (ioctl(minor_of(map)->fd, UFFDIO_CONTINUE, &request) == 0)
            return 1;
        if (request.mapped > 0) {
            any = 1;
            /* why it stopped there is told by the next one */
            from += (uint64_t)request.mapped;
        } else if (errno == EEXIST)
            from += PCOW_PAGE_SIZE;
        else if (errno != EAGAIN)
            return -errno;
    }
    return any;
}

/* A load that had to be made own first gains nothing. */
static int let_in_range(struct pcow_map *map, uint64_t guest_slab, struct range range, bool gains)
{
    uint64_t from = (guest_slab << SLAB_BITS) + range.first * PCOW_PAGE_SIZE;
    int ret = let_in(map, from, from + range.count * PCOW_PAGE_SIZE);

    count_gain(map, gains && ret > 0);
    /*
     * What the kernel does not let in is mapped in the ordinary way, and whoever accesses it meets
     * what is wrong with it.
     */
    return ret < 0 ? layout_map_slab(map, guest_slab) : 0;
}

static int let_in_pages(struct pcow_map *map, uint64_t guest_slab, unsigned first,
                        unsigned count)
{
    return let_in_range(map, guest_slab, (struct range){first, count}, true);
}

/* Those in the set around a page, in its cluster of so many pages. */
static int let_in_around(struct pcow_map *map, uint64_t guest_slab, unsigned page, unsigned pages)
{
    const struct page_set *writable = &map->slabs[guest_slab].writable;
    unsigned first = page / pages * pages, end = page_set_run_end(writable, page, first + pages),
             begin = page;

    while (begin > first && page_set_has(writable, begin - 1))
        begin--;
    return let_in_pages(map, guest_slab, begin, end - begin);
}

/*
 * Everything that is mapped for stores goes for a moment, see keep(). On a failure nobody
 * knows what is there.
 */
static int map_registered(struct pcow_map *map, uint64_t guest_slab, uint64_t p)
{
    uint8_t *address = map->address + (guest_slab << SLAB_BITS);
    size_t length = layout_pages(map, guest_slab) * PCOW_PAGE_SIZE;
    int ret =
        file_map(&map->image->file, address, length, p << SLAB_BITS, FILE_MAP_LATER, MAP_FIXED);

    /* A child would see what lies there and is not own: userfaultfd does not follow it. */
    if (!ret && madvise(address, length, MADV_DONTFORK))
        ret = -errno;
    if (!ret)
        ret = register_range(map, address, length);
    if (!ret && mprotect(address, length, PROT_READ | PROT_WRITE))
        ret = -errno;
    return ret;
}

static void let_in_own(struct pcow_map *map, uint64_t guest_slab)
{
    const struct page_set *writable = &map->slabs[guest_slab].writable;
    uint64_t start = guest_slab << SLAB_BITS;

    for (unsigned page = 0; page < PAGES_PER_SLAB;) {
        unsigned end = page_set_run_end(writable, page, PAGES_PER_SLAB);

        /* If it fails they trap, and it is tried again. */
        if (page_set_has(writable, page) && end - page <= LET_IN_AT_ONCE)
            let_in(map, start + page * PCOW_PAGE_SIZE, start + end * PCOW_PAGE_SIZE);
        page = end;
    }
}

/* Maps it to this file slab. False: all is as before, or mapped in the ordinary way. */
static bool begin(struct pcow_map *map, uint64_t guest_slab, uint64_t p)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    enum slab_state before = slab_state(&slab->status);

    /*
     * Either who has a system call access the slab sees this, or he is seen here, see slab_ask().
     * Other accesses to it trap while there is nothing, and wait for the claim.
     */
    layout_enter(map, guest_slab, SLAB_MINOR);
    if (__atomic_load_n(&slab->asked, __ATOMIC_SEQ_CST)) {
        layout_enter(map, guest_slab, before);
        return false;
    }
    if (map_registered(map, guest_slab, p)) {
        layout_map_slab(map, guest_slab);
        return false;
    }
    vmas_begin(map, slab);
    vmas_add(map, 1 - (int)slab->pieces);
    slab->pieces = 1;
    slab->holes = 0;
    slab_refresh(&slab->status);                /* nothing of an older layer is mapped */
    density_forget(&map->density, map->address + (guest_slab << SLAB_BITS), PCOW_SLAB_SIZE);
    return true;
}

static bool keep(struct pcow_map *map, uint64_t guest_slab, bool at_once)
{
    bool soon = at_once || map->slabs[guest_slab].faults >= TRAPS
                || __atomic_load_n(&minor_of(map)->gain, __ATOMIC_RELAXED) >= PROVEN;
    uint64_t p = soon ? own_slab(map, guest_slab) : 0;

    if (p == 0 || !can_keep(map, guest_slab) || (!at_once && !is_worth_it(map))
        || !begin(map, guest_slab, p))
        return false;
    count_gain(map, -COST);
    let_in_own(map, guest_slab);
    return true;
}

/* Are as many mappings left as it takes to map the slab as under signal? */
static bool fits_in_pieces(const struct pcow_map *map, uint64_t guest_slab)
{
    return vmas_used(map) + layout_count_pieces(map, guest_slab) < map->vma_budget;
}

static bool was_asked_for(const struct slab_map *slab)
{
    return __atomic_load_n(&slab->asked, __ATOMIC_SEQ_CST);
}

/*
 * Mapped as under signal. If there are not as many mappings left as that takes the slab is made
 * whole; where that cannot be (a full pool), they come from what is kept for others, as nobody must
 * wait who only loads. What is mapped for stores stays so all the time: system calls may be using
 * it, and an instruction that loads and stores must find both.
 */
static int leave(struct pcow_map *map, uint64_t guest_slab)
{
    if (!fits_in_pieces(map, guest_slab))
        layout_own_whole(map, guest_slab);
    return layout_map_slab(map, guest_slab);
}

/* A page that is in the set already. */
static int meet(struct pcow_map *map, uint64_t guest_slab, unsigned page)
{
    unsigned cluster = layout_cluster(map);

    return was_asked_for(&map->slabs[guest_slab])
               ? leave(map, guest_slab)
               : let_in_around(map, guest_slab, page,
                               cluster < MOST_LET_IN ? cluster : MOST_LET_IN);
}

/* Of a load, what is around it, too: who reads on would trap for each page. */
static struct range around(const struct pcow_map *map, uint64_t guest_slab, unsigned page)
{
    unsigned first = page / MOST_LET_IN * MOST_LET_IN,
             left = layout_pages(map, guest_slab) - first;

    return (struct range){first, left < MOST_LET_IN ? left : MOST_LET_IN};
}

/*
 * There are no mappings for the slab as under signal, so it stays in minor mode, or goes on in it
 * after a snapshot: what is accessed becomes own. -ENOSPC, -EIO, -EAGAIN: not so.
 */
static int stay(struct pcow_map *map, uint64_t guest_slab, unsigned page, bool write)
{
    const struct slab_status *status = &map->slabs[guest_slab].status;
    struct range range = write ? (struct range){page, 1} : around(map, guest_slab, page);
    int ret = layout_own(map, guest_slab, range.first, range.count, NULL);
    uint64_t p;

    if ((ret == -ENOSPC || ret == -EIO) && range.count > 1) {
        range = (struct range){page, 1};
        ret = layout_own(map, guest_slab, page, 1, NULL);
    }
    if (ret)
        return ret;
    p = own_slab(map, guest_slab);
    if (slab_state(status) == SLAB_MINOR_FROZEN && (!p || !begin(map, guest_slab, p)))
        return -EAGAIN;
    ret = layout_map_own(map, guest_slab, range.first, range.count);
    return ret || !slab_is_kept(status) ? ret : let_in_range(map, guest_slab, range, write);
}

/*
 * Also of a slab in state UNKNOWN, which may be in minor mode still, as the kernel refused to unmap
 * it: to make all of it own for one access, as of one that is unmapped, would take space for
 * nothing.
 */
static int serve(struct pcow_map *map, uint64_t guest_slab, unsigned page, bool write)
{
    struct slab_map *slab = &map->slabs[guest_slab];
    bool may_stay = slab_is_kept(&slab->status) && !was_asked_for(slab);
    bool stays = may_stay && slab_state(&slab->status) == SLAB_MINOR;
    int ret;

    if (slab_is_kept(&slab->status) && page_set_has(&slab->writable, page))
        return meet(map, guest_slab, page);
    if (write && stays)
        return KEEPER_GO_ON;
    if (may_stay && !fits_in_pieces(map, guest_slab) && !stay(map, guest_slab, page, write))
        return 0;
    /* The kernel has refused: it is mapped as under signal, and whoever asks now relies on that. */
    if (may_stay && slab_state(&slab->status) == SLAB_MAPPED)
        return write ? KEEPER_GO_ON : 0;
    if (stays) {
        slab->loaded = 1;
        count_gain(map, -LOSS);
    }
    ret = leave(map, guest_slab);
    return ret || !write ? ret : KEEPER_GO_ON;
}

static bool shows(const struct pcow_map *map, uint64_t guest_slab, unsigned page, uint64_t offset)
{
    return slab_state(&map->slabs[guest_slab].status) == SLAB_MINOR
           && offset
                  == (slab_ref_slab(map->image->chain->head[guest_slab]) << SLAB_BITS)
                         + page * PCOW_PAGE_SIZE;
}

static void end_whole(struct pcow_map *map, uint64_t guest_slab)
{
    uint8_t *address = map->address + (guest_slab << SLAB_BITS);
    struct uffdio_range range = {(uintptr_t)address,
                                 layout_pages(map, guest_slab) * PCOW_PAGE_SIZE};

    if (slab_state(&map->slabs[guest_slab].status) != SLAB_MINOR)
        return;
    /* If the kernel refuses, its pages go on to be let in. */
    if (ioctl(minor_of(map)->fd, UFFDIO_UNREGISTER, &range) == 0) {
        madvise(address, range.len, MADV_DOFORK);      /* one with its neighbours, if it can be */
        layout_enter(map, guest_slab, SLAB_MAPPED);
    }
}

static void freeze(struct pcow_map *map, uint64_t guest_slab)
{
    layout_enter(map, guest_slab, SLAB_MINOR_FROZEN);
}

static const struct slab_keeper keeper = {
    .serve = serve,
    .shows = shows,
    .page_ready = let_in_pages,
    .whole = end_whole,
    .freeze = freeze,
};

/* ---- when a map begins and ends -------------------------------------------------------------- */

static int open_descriptor(void)
{
    struct uffdio_api api = {.api = UFFD_API,
                             .features = UFFD_FEATURE_SIGBUS | UFFD_FEATURE_MINOR_SHMEM
                                         | UFFD_FEATURE_WP_HUGETLBFS_SHMEM};
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);

    if (fd >= 0 && ioctl(fd, UFFDIO_API, &api)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Can mappings of this file be registered? */
static bool is_possible(const struct pcow_map *map)
{
    void *page = mmap(NULL, PCOW_PAGE_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool possible =
        page != MAP_FAILED
        && file_map(&map->image->file, page, PCOW_PAGE_SIZE, 0, FILE_MAP_LATER, MAP_FIXED) == 0
        && register_range(map, page, PCOW_PAGE_SIZE) == 0;

    if (page != MAP_FAILED)
        munmap(page, PCOW_PAGE_SIZE);
    return possible;
}

static void close_minor(struct pcow_map *map)
{
    struct minor *minor = minor_of(map);

    if (minor && minor->fd >= 0)
        close(minor->fd);
    free(minor);
    map->of_engine = NULL;
}

static bool prepare(struct pcow_map *map)
{
    bool served = map->serves_sigbus || dispatch_serves_bus();
    struct minor *minor = calloc(1, sizeof *minor);

    if (!minor)
        return false;
    map->of_engine = minor;
    minor->gain = GAIN_AT_FIRST;
    minor->fd = -1;
    if (map->image->file.writable
        && map->image->file.persist.persistence == PCOW_PERSISTENCE_VOLATILE && served)
        minor->fd = open_descriptor();
    if (minor->fd < 0 || !is_possible(map)) {
        close_minor(map);
        return false;
    }
    map->keepers[SLAB_MINOR] = map->keepers[SLAB_MINOR_FROZEN] = map->keepers[SLAB_UNKNOWN] =
        &keeper;
    return true;
}

const struct engine engine_minor = {
    .number = PCOW_ENGINE_MINOR,
    .traps_by_bus = true,
    .must_be_asked = true,
    .prepare = prepare,
    .close = close_minor,
    .can_keep = can_keep,
    .keep = keep,
};
