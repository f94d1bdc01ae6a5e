/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The handlers: of SIGSEGV, which every engine needs for stores to read-only mappings, and of
 * SIGBUS, which are traps of slabs that an engine keeps, and what cannot be read.
 *
 * A signal handler belongs to the process, so this file keeps what the process shares: the list of
 * live maps, and the handler that was there before, which gets every signal that is not ours.
 */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "monitor/monitor.h"
#include "persist/copy.h"
#include "util/error.h"

#define MAX_MAPS 256
#define MOST_TRIES 16u
#define LOOK_NS 10000L                 /* a handler is through with the list sooner */

static struct {
    struct pcow_map *map[MAX_MAPS];    /* atomics; NULL: free */
    pthread_mutex_t lock;              /* registration only, never taken in the handler */
    bool installed;
    /* a page that the kernel empties in a child: what is mapped there is the parent's */
    uint8_t *here;
    struct sigaction previous;
    bool serves_bus;                   /* nobody else did */
    /* handlers that look at maps of which they do not know whether they are in use */
    unsigned looking;
} process = {.lock = PTHREAD_MUTEX_INITIALIZER};

/*
 * A map that is found on the list stays between these two, and one in which somebody has trapped
 * until he has left it. As dispatch_leave() clears a place before it looks at the number, either it
 * sees the handler or the handler does not see the map.
 */
static void begin_look(void)
{
    __atomic_fetch_add(&process.looking, 1, __ATOMIC_SEQ_CST);
}

static void end_look(void)
{
    __atomic_fetch_sub(&process.looking, 1, __ATOMIC_SEQ_CST);
}

/*
 * A child has the range and this handler, but tables and free slabs of its own: what it brought
 * into the file would be in the way of what its parent brings there. Also without fork() of libc,
 * where no handler of its would be called.
 */
static bool is_child(void)
{
    const uint8_t *here = __atomic_load_n(&process.here, __ATOMIC_ACQUIRE);

    return here && !__atomic_load_n(here, __ATOMIC_RELAXED);
}

int dispatch_prepare(struct pcow_error *error)
{
    int ret = 0;

    pthread_mutex_lock(&process.lock);
    if (!process.here) {
        uint8_t *page =
            mmap(NULL, PCOW_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (page == MAP_FAILED || madvise(page, PCOW_PAGE_SIZE, MADV_WIPEONFORK)) {
            ret = -errno;
        } else {
            *page = 1;
            __atomic_store_n(&process.here, page, __ATOMIC_RELEASE);
        }
        if (ret && page != MAP_FAILED)
            munmap(page, PCOW_PAGE_SIZE);
    } else if (is_child()) {
        memset(process.map, 0, sizeof process.map);
        process.looking = 0;
        vmas_forget_all();
        __atomic_store_n(process.here, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&process.lock);
    return ret ? error_set_errno(error, ret, "cannot mark the process that maps images") : 0;
}

/* x86 page fault error code, bit 1: the access was a write (Intel SDM vol. 3, 4.7). */
static bool is_write(const ucontext_t *context)
{
    return context->uc_mcontext.gregs[REG_ERR] & 2;
}

/*
 * Bit 4: an instruction was to be executed from there, which no mapping of ours lets happen, nor
 * one that lifts what a protection key forbids: who tried it would do so for ever.
 */
static bool is_load_or_store(const siginfo_t *info, const ucontext_t *context)
{
    return !(context->uc_mcontext.gregs[REG_ERR] & 16) && info->si_code != SEGV_PKUERR;
}

/* Somebody sent it (kill, sigqueue): it tells of no access, and si_addr means nothing. */
static bool from_outside(const siginfo_t *info)
{
    return info->si_code <= 0;
}

static void pass_on(int signal, siginfo_t *info, void *context)
{
    const struct sigaction *previous = &process.previous;

    if (previous->sa_flags & SA_SIGINFO) {
        previous->sa_sigaction(signal, info, context);
    } else if (previous->sa_handler == SIG_DFL || previous->sa_handler == SIG_IGN) {
        /*
         * Back to the default: the instruction is executed again and the process ends as it would
         * have without us.
         */
        struct sigaction standard = {.sa_handler = SIG_DFL};

        if (from_outside(info) && previous->sa_handler == SIG_IGN)
            return;
        sigaction(signal, &standard, NULL);
        if (from_outside(info))
            raise(signal);             /* no instruction will do it again */
    } else {
        previous->sa_handler(signal);
    }
}

/*
 * SIGBUS to this thread, as for a failed page-in, with the address and the reason. Blocked until
 * the return from the handler, which restores the mask: so it comes at the instruction that has
 * failed, where whoever serves it can tell what that was, and not in the midst of us.
 */
static void fail_access(const siginfo_t *info, int error)
{
    siginfo_t failed = {.si_signo = SIGBUS, .si_code = SI_QUEUE, .si_errno = -error};

    failed.si_pid = getpid();
    failed.si_uid = getuid();
    failed.si_value.sival_ptr = info->si_addr;
    /*
     * And whatever else may be: a handler that ran in between could load from the image, and the
     * process would end at its trap.
     */
    signals_change(SIG_BLOCK, ~SIGNALS_LEFT | SIGNAL_BIT(SIGBUS));
    syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), SIGBUS, &failed);
}

/* In memory that the library has of a file, of its own or of one in a chain that is mapped. */
static bool is_in_window(const uint8_t *address)
{
    uint64_t offset;
    bool found = false;

    begin_look();
    for (unsigned i = 0; i < MAX_MAPS && !found && !is_child(); i++) {
        struct pcow_map *map = __atomic_load_n(&process.map[i], __ATOMIC_SEQ_CST);

        for (struct pcow_image *image = map ? map->image : NULL; image && !found;
             image = image->base)
            found = file_find_window_at(&image->file, address, &offset);
    }
    end_look();
    return found;
}

/* The map of which this is an address, or NULL. It stays until leave_map(). */
static struct pcow_map *enter_map(const uint8_t *address)
{
    struct pcow_map *found = NULL;

    begin_look();
    for (unsigned i = 0; i < MAX_MAPS && !found && !is_child(); i++) {
        struct pcow_map *map = __atomic_load_n(&process.map[i], __ATOMIC_SEQ_CST);

        if (map && address >= map->address && address < map->address + map->size)
            found = map;
    }
    if (found)
        __atomic_fetch_add(&found->traps_under_way, 1, __ATOMIC_SEQ_CST);
    end_look();
    return found;
}

static void leave_map(struct pcow_map *map)
{
    __atomic_fetch_sub(&map->traps_under_way, 1, __ATOMIC_SEQ_CST);
}

/*
 * The kernel met the error in a system call, and the signal comes right behind it: the call returns
 * an error.
 */
static bool is_after_system_call(const ucontext_t *context)
{
    const uint8_t *pc = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP];

    return pc[-2] == 0x0f && pc[-1] == 0x05;
}

/* The mask that the thread had at the instruction. */
static signal_mask mask_at(const ucontext_t *context)
{
    signal_mask mask;

    memcpy(&mask, &context->uc_sigmask, sizeof mask);
    return mask;
}

/*
 * Serve an access, or have it fail. Interrupts are disabled; while it waits it does so with this
 * mask.
 */
static void serve(struct pcow_map *map, const siginfo_t *info, const ucontext_t *context,
                  signal_mask waiting, int *ret)
{
    uint64_t offset = (uint64_t)((uint8_t *)info->si_addr - map->address);

    __atomic_fetch_add(is_write(context) ? &map->stats.write_traps : &map->stats.read_traps, 1,
                       __ATOMIC_RELAXED);
    *ret = resolve(map, offset, is_write(context), &waiting);
}

/* The traps of slabs that the engine keeps, and whatever else the kernel tells in this way. */
static bool may_be_trap(const struct pcow_map *map, const siginfo_t *info)
{
    return map->engine->traps_by_bus && info->si_code == BUS_ADRERR;
}

static bool is_trap(const struct pcow_map *map, const siginfo_t *info)
{
    uint64_t offset = (uint64_t)((uint8_t *)info->si_addr - map->address);

    /* One that is being unmapped or watched, or could not be, traps as it did. */
    return may_be_trap(map, info)
           && !slab_can_be_loaded_from(&map->slabs[offset >> SLAB_BITS].status);
}

bool pcow_is_trap(const siginfo_t *info)
{
    struct pcow_map *map = info->si_code == BUS_ADRERR ? enter_map(info->si_addr) : NULL;
    bool trap = map && is_trap(map, info);

    if (map)
        leave_map(map);
    return trap;
}

/*
 * In our handler signals are blocked already; another may be the program's, which knows nothing of
 * claims.
 */
static void serve_from(struct pcow_map *map, const siginfo_t *info, const ucontext_t *context,
                       bool own_handler, int *ret)
{
    struct interrupts interrupts = {.signals = mask_at(context)};

    if (own_handler)
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &interrupts.cancel_state);
    else
        interrupts = interrupts_disable();
    serve(map, info, context, interrupts.signals, ret);
    if (own_handler)
        pthread_setcancelstate(interrupts.cancel_state, NULL);
    else
        interrupts_restore(interrupts);
}

static bool serve_trap(const siginfo_t *info, const ucontext_t *context, bool own_handler)
{
    struct pcow_map *map = info->si_code == BUS_ADRERR ? enter_map(info->si_addr) : NULL;
    bool served = false;
    int ret = 0;

    /*
     * If the slab was left just now there is something by now; what lies in an ordinary mapping and
     * cannot be loaded is what the signal tells of. Or it is kept again, and the load that
     * asks is a trap itself.
     */
    for (unsigned tries = 0; map && may_be_trap(map, info) && !served && tries < MOST_TRIES;
         tries++)
        if (is_trap(map, info)) {
            serve_from(map, info, context, own_handler, &ret);
            served = true;
        } else {
            served = copy_touch(info->si_addr);
        }
    if (map)
        leave_map(map);
    if (ret)
        fail_access(info, ret);
    return served;
}

/*
 * A store to a page that is mapped for stores, for which the file system had no space: see
 * image/folio.c.
 */
static bool serve_store(const siginfo_t *info, const ucontext_t *context, bool own_handler)
{
    struct pcow_map *map =
        info->si_code == BUS_ADRERR && is_write(context) ? enter_map(info->si_addr) : NULL;
    bool served = map && map->image->file.persist.persistence == PCOW_PERSISTENCE_PAGE_CACHE;
    int ret = 0;

    if (served)
        serve_from(map, info, context, own_handler, &ret);
    if (map)
        leave_map(map);
    if (ret)
        fail_access(info, ret);
    return served;
}

/*
 * A load of what is there, for which the kernel wants a block, see monitor/holes.c. Or any access
 * that was a trap, to such a hole in a slab which another thread has mapped since: once that can be
 * loaded, a store to it traps again.
 */
static bool serve_hole(const siginfo_t *info, const ucontext_t *context)
{
    struct pcow_map *map = info->si_code == BUS_ADRERR ? enter_map(info->si_addr) : NULL;
    bool served = map && (!is_write(context) || may_be_trap(map, info))
                  && holes_serve(map, (uint64_t)((uint8_t *)info->si_addr - map->address));

    if (map)
        leave_map(map);
    return served;
}

static bool serve_bus(const siginfo_t *info, void *context, bool own_handler)
{
    /* A load from another image, which could not be served: see fail_access(). */
    if (info->si_code == SI_QUEUE && info->si_pid == getpid())
        return copy_fail_at(context);
    /*
     * An error that the kernel has found by itself comes at any instruction, and is none of what
     * that does.
     */
    if (from_outside(info) || info->si_code == BUS_MCEERR_AO)
        return false;
    return copy_fail_at(context) || serve_trap(info, context, own_handler)
           || serve_store(info, context, own_handler) || serve_hole(info, context)
           || (is_in_window(info->si_addr) && is_after_system_call(context));
}

bool pcow_serve_sigbus(const siginfo_t *info, void *context)
{
    int saved_errno = errno;
    bool served = serve_bus(info, context, false);

    errno = saved_errno;
    return served;
}

static void handle_fault(int signal, siginfo_t *info, void *context)
{
    int saved_errno = errno, ret;
    struct pcow_map *map =
        from_outside(info) || !is_load_or_store(info, context) ? NULL : enter_map(info->si_addr);

    if (map) {
        serve_from(map, info, context, true, &ret);
        leave_map(map);
        errno = saved_errno;
        /* A store to an image that is open read-only is passed on: as to any read-only memory. */
        if (ret != -EROFS) {
            if (ret)
                fail_access(info, ret);
            return;
        }
    }
    errno = saved_errno;
    /* As if our handler were not there. */
    signals_change(SIG_SETMASK, mask_at(context));
    pass_on(signal, info, context);
}

/*
 * Where the program has no handler: what the library copies may be unreadable. All else ends the
 * process, as it would have without us.
 */
static void handle_bus(int signal, siginfo_t *info, void *context)
{
    struct sigaction standard = {.sa_handler = SIG_DFL};
    int saved_errno = errno;
    bool served = serve_bus(info, context, true);

    errno = saved_errno;
    if (!served) {
        sigaction(signal, &standard, NULL);
        if (from_outside(info) || info->si_code == BUS_MCEERR_AO)
            raise(signal);             /* no instruction will do it again */
    }
}

static bool has_action(int signal, void (*handler)(int, siginfo_t *, void *))
{
    struct sigaction action;

    return sigaction(signal, NULL, &action) == 0
        && (handler ? (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == handler
                    : !(action.sa_flags & SA_SIGINFO) && action.sa_handler == SIG_DFL);
}

/* Other signals are blocked in it: a trap claims the guest slab. See util/signals.h. */
static struct sigaction our_action(void (*handler)(int, siginfo_t *, void *))
{
    struct sigaction action = {.sa_sigaction = handler,
                               .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    signal_mask mask = ~SIGNALS_LEFT;

    sigemptyset(&action.sa_mask);
    memcpy(&action.sa_mask, &mask, sizeof mask);
    return action;
}

static void install_bus_handler(void)
{
    struct sigaction action = our_action(handle_bus);

    process.serves_bus = has_action(SIGBUS, NULL) && sigaction(SIGBUS, &action, NULL) == 0;
}

bool dispatch_serves_bus(void)
{
    bool serves;

    pthread_mutex_lock(&process.lock);
    if (!process.serves_bus || has_action(SIGBUS, NULL))
        install_bus_handler();
    serves = process.serves_bus && has_action(SIGBUS, handle_bus);
    pthread_mutex_unlock(&process.lock);
    return serves;
}

int dispatch_register(struct pcow_map *map, struct pcow_error *error)
{
    int ret = -EMFILE;

    pthread_mutex_lock(&process.lock);
    if (!process.installed) {
        struct sigaction action = our_action(handle_fault);

        if (sigaction(SIGSEGV, &action, &process.previous) == 0)
            process.installed = true;
    }
    if (!process.serves_bus || has_action(SIGBUS, NULL))
        install_bus_handler();
    for (unsigned i = 0; i < MAX_MAPS && process.installed && ret; i++)
        if (!process.map[i]) {
            __atomic_store_n(&process.map[i], map, __ATOMIC_SEQ_CST);
            ret = 0;
        }
    pthread_mutex_unlock(&process.lock);
    return ret ? error_set(error, ret, "cannot map %s: more than %d images in one process",
                           map->image->file.path, MAX_MAPS)
               : 0;
}

void dispatch_leave(struct pcow_map *map)
{
    const struct timespec interval = {0, LOOK_NS};

    pthread_mutex_lock(&process.lock);
    for (unsigned i = 0; i < MAX_MAPS; i++)
        if (process.map[i] == map)
            __atomic_store_n(&process.map[i], NULL, __ATOMIC_SEQ_CST);
    /*
     * Asleep, as it may be a thread of less priority. Who waits in the map for space has been told
     * that it closes.
     */
    while (__atomic_load_n(&process.looking, __ATOMIC_SEQ_CST)
           || __atomic_load_n(&map->traps_under_way, __ATOMIC_SEQ_CST))
        nanosleep(&interval, NULL);
    pthread_mutex_unlock(&process.lock);
}

void dispatch_end(void)
{
    bool last = true;

    pthread_mutex_lock(&process.lock);
    for (unsigned i = 0; i < MAX_MAPS; i++)
        last &= process.map[i] == NULL;
    /* Only if nobody has put a handler on top of ours meanwhile: it would lose its way down. */
    if (last && process.installed && has_action(SIGSEGV, handle_fault)) {
        sigaction(SIGSEGV, &process.previous, NULL);
        process.installed = false;
    }
    if (last && process.serves_bus) {
        if (has_action(SIGBUS, handle_bus))
            signal(SIGBUS, SIG_DFL);
        process.serves_bus = false;
    }
    pthread_mutex_unlock(&process.lock);
}
