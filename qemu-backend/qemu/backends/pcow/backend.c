/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * memory-backend-file on a pcow image: open, map, hand out, close.
 */
#include "qemu/osdep.h"
#include <pcow.h>
#include "hw/qdev-core.h"
#include "hw/virtio/vhost.h"
#include "migration/misc.h"
#include "qapi/error.h"
#include "qemu/bitmap.h"
#include "qemu/cutils.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "qom/object_interfaces.h"
#include "system/block-backend.h"
#include "system/hostmem-pcow.h"
#include "system/kvm.h"
#include "system/pcow-compat.h"
#include "system/runstate.h"
#include "system/system.h"
#include "system/tcg.h"

/* "\x89PCOW\r\n\x1a": text tools, line-ending filters and 7-bit paths break it */
static const uint8_t pcow_magic[8] = {
    0x89, 'P', 'C', 'O', 'W', '\r', '\n', 0x1a
};

static bool has_magic(const char *path)
{
    uint8_t magic[sizeof(pcow_magic)];
    struct stat st;
    bool found;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0) {
        return false;
    }
    found = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) &&
            pread(fd, magic, sizeof(magic), 0) == sizeof(magic) &&
            memcmp(magic, pcow_magic, sizeof(magic)) == 0;
    close(fd);
    return found;
}

/*
 * The name of the file itself, where a link has another one: libvirt names the
 * file of the guest's RAM, and its hook has that name lead to an image.
 */
static char *resolve_link(const char *path)
{
    g_autofree char *real = NULL;

    if (!g_str_has_suffix(path, ".pcow")) {
        real = realpath(path, NULL);
    }
    return g_strdup(real && g_str_has_suffix(real, ".pcow") ? real : path);
}

bool hostmem_pcow_probe(const HostMemPcow *pcow, const char *given,
                        bool *is_pcow, Error **errp)
{
    g_autofree char *path = NULL;

    *is_pcow = false;
    if (!given || pcow->format == HOST_MEM_FORMAT_RAW) {
        return true;
    }
    if (pcow->format == HOST_MEM_FORMAT_PCOW) {
        *is_pcow = true;
        return true;
    }
    path = resolve_link(given);
    if (!g_str_has_suffix(path, ".pcow")) {
        if (has_magic(path)) {
            warn_report("'%s' looks like a pcow image but is mapped raw, as "
                        "its name does not end in .pcow: the guest can "
                        "overwrite its structures. Give format=pcow to open "
                        "it as one, or format=raw to silence this", path);
        }
        return true;
    }
    if (access(path, F_OK) < 0) {
        error_setg_errno(errp, errno, "pcow image '%s'", path);
        error_append_hint(errp, "Make it with 'pcow-img create', or give "
                          "format=raw for a plain memory file.\n");
        return false;
    }
    if (access(path, R_OK) < 0) {
        error_setg_errno(errp, errno, "pcow image '%s' cannot be read", path);
        return false;
    }
    if (!has_magic(path)) {
        error_setg(errp, "'%s' is named like a pcow image but does not begin "
                   "like one; if it was one, see 'pcow-img check'; give "
                   "format=raw to map it as a plain memory file", path);
        return false;
    }
    *is_pcow = true;
    return true;
}

static bool check_options(HostMemPcow *pcow, HostMemoryBackend *backend,
                          const char *path, uint64_t align, uint64_t offset,
                          bool discard_data, Error **errp)
{
    if (!backend->share) {
        error_setg(errp, "pcow image '%s' needs share=on: with share=off what "
                   "the guest writes would be lost (libvirt: access='shared')",
                   path);
        return false;
    }
    if (offset) {
        error_setg(errp, "pcow image '%s' is mapped whole: offset must be 0",
                   path);
        return false;
    }
    if (align > PCOW_SLAB_SIZE || !is_power_of_2(align ?: 1)) {
        error_setg(errp, "pcow image '%s' is aligned to 2 MiB: leave out "
                   "align, or give a power of two up to 2M", path);
        return false;
    }
    if (discard_data) {
        error_setg(errp, "pcow image '%s' cannot be used with "
                   "discard-data=on, which destroys the data on exit", path);
        return false;
    }
    if (backend->guest_memfd) {
        error_setg(errp, "pcow image '%s' cannot be memory of a confidential "
                   "guest", path);
        return false;
    }
    if (pcow->engine == HOST_MEM_PCOW_ENGINE_KVM && !kvm_enabled()) {
        error_setg(errp, "pcow-engine=kvm of pcow image '%s' needs accel=kvm: "
                   "leave pcow-engine out", path);
        return false;
    }
    if (migration_is_running()) {
        error_setg(errp, "the VM is being migrated, without pcow image '%s': "
                   "add it when that has ended", path);
        return false;
    }
    return true;
}

/* Options that cannot be honoured and do no harm when they are not. */
static void ignore_options(HostMemoryBackend *backend, const char *path)
{
    /* libvirt asks for it with every nvdimm; it would copy the whole base */
    backend->prealloc = false;
    /* KSM does not look at file mappings */
    backend->merge = false;
    if (backend->policy != HOST_MEM_POLICY_DEFAULT ||
        !bitmap_empty(backend->host_nodes, MAX_NODES + 1)) {
        warn_report("pcow image '%s' stays on the NUMA node of its pool: "
                    "host-nodes and policy are ignored", path);
        backend->policy = HOST_MEM_POLICY_DEFAULT;
        bitmap_zero(backend->host_nodes, MAX_NODES + 1);
    }
}

/* Under KVM the guest's stores are not signals, whatever was asked for. */
static enum pcow_engine choose_engine(HostMemPcowEngine engine)
{
    QEMU_BUILD_BUG_ON((int)HOST_MEM_PCOW_ENGINE_SIGNAL != PCOW_ENGINE_SIGNAL ||
                      (int)HOST_MEM_PCOW_ENGINE_KVM != PCOW_ENGINE_KVM ||
                      (int)HOST_MEM_PCOW_ENGINE_MINOR != PCOW_ENGINE_MINOR);

    if (kvm_enabled()) {
        return PCOW_ENGINE_KVM;
    }
    return engine == HOST_MEM_PCOW_ENGINE_SIGNAL ? PCOW_ENGINE_SIGNAL
                                                 : PCOW_ENGINE_MINOR;
}

/*
 * QEMU leaves its directory with -daemonize, when the image is open already,
 * and who asks for its name would not know where it was.
 */
static char *absolute_path(const char *path)
{
    g_autofree char *directory = g_path_get_dirname(path);
    g_autofree char *name = g_path_get_basename(path);
    char *real, *result;

    if (g_path_is_absolute(path)) {
        return g_strdup(path);
    }
    real = realpath(directory, NULL);
    result = real ? g_build_filename(real, name, NULL) : g_strdup(path);
    free(real);
    return result;
}

static bool open_image(HostMemPcow *pcow, const char *given, Error **errp)
{
    g_autofree char *file = resolve_link(given);
    g_autofree char *path = absolute_path(file);
    struct pcow_map_options options = {
        .engine = choose_engine(pcow->engine),
        .full_policy = (enum pcow_full_policy)pcow->full,
        .serves_sigbus = true,
    };
    struct pcow_error error;

    QEMU_BUILD_BUG_ON((int)HOST_MEM_PCOW_FULL_FAIL != PCOW_FULL_FAIL);

    if (pcow_open(path, pcow->readonly ? 0 : PCOW_OPEN_WRITE, NULL,
                  &pcow->image, &error) < 0) {
        pcow->image = NULL;
        error_setg(errp, "%s", error.message);
        return false;
    }
    if (pcow->backend->size && pcow->backend->size != pcow_size(pcow->image)) {
        error_setg(errp, "pcow image '%s' has %" PRIu64 " bytes, but "
                   "size=%" PRIu64 " is asked for; leave out size, give that "
                   "of the image, or change the image with 'pcow-img resize'",
                   path, pcow_size(pcow->image), pcow->backend->size);
        return false;
    }
    if (pcow_map_create(pcow->image, &options, &pcow->map, &error) < 0) {
        pcow->map = NULL;
        error_setg(errp, "%s", error.message);
        return false;
    }
    return true;
}

/* The image is mapped, and the guest does not see it yet. */
static bool check_vhost(HostMemPcow *pcow, Error **errp)
{
    if (vhost_in_use()) {
        vhost_begin_asking();
    }
    if (vhost_in_use()) {
        error_setg(errp, "pcow image '%s' cannot be added beside a vhost "
                   "device at work: one in another process maps guest memory by file "
                   "descriptor, and one in the kernel cannot ask before it "
                   "stores to pages that must be copied first; use devices of "
                   "QEMU (vhost=off)", pcow_path(pcow->image));
        return false;
    }
    return true;
}

static bool start_events(HostMemPcow *pcow, Error **errp)
{
    int ret;

    if (!hostmem_pcow_error_init(errp)) {
        return false;
    }
    ret = event_notifier_init(&pcow->became_full, false);
    if (ret < 0) {
        error_setg_errno(errp, -ret, "cannot watch pcow image '%s'",
                         pcow_path(pcow->image));
        return false;
    }
    event_notifier_set_handler(&pcow->became_full, hostmem_pcow_handle_full);
    pcow->listener = timer_new_ms(QEMU_CLOCK_REALTIME,
                                  hostmem_pcow_handle_silence, pcow);
    hostmem_pcow_begin_telling(pcow);
    qemu_set_fd_handler(pcow_map_event_fd(pcow->map),
                        hostmem_pcow_handle_events, NULL, pcow);
    hostmem_pcow_watch_space(pcow);
    hostmem_pcow_note_freeze();
    if (tcg_enabled()) {
        hostmem_pcow_tcg_init();
    }
    return true;
}

static void close_image(HostMemPcow *pcow)
{
    struct pcow_error error;

    if (pcow->map) {
        if (pcow->became_full.initialized) {
            event_notifier_set_handler(&pcow->became_full, NULL);
            event_notifier_cleanup(&pcow->became_full);
            timer_free(pcow->listener);
            pcow->listener = NULL;
            hostmem_pcow_end_telling(pcow);
        }
        hostmem_pcow_end_space(pcow);
        qemu_set_fd_handler(pcow_map_event_fd(pcow->map), NULL, NULL, NULL);
        pcow_map_destroy(pcow->map);
        pcow->map = NULL;
    }
    if (pcow->image && !pcow->readonly &&
        pcow_finish(pcow->image, &error) < 0) {
        error_report("%s", error.message);
    }
    pcow_close(pcow->image);
    pcow->image = NULL;
}

/*
 * The machine keeps its backends until the process is gone, so finalize does
 * not come.  Threads may still run if exit() was called in the middle of
 * things, and a flush or a change whose client is gone, or a dump; then the
 * memory has to stay, and the kernel drops the lock.
 */
static void exit_notify(Notifier *notifier, void *data)
{
    HostMemPcow *pcow = container_of(notifier, HostMemPcow, exit);
    Error *err = NULL;

    if (!pcow->readonly && hostmem_pcow_flush(pcow, &err) < 0) {
        error_report_err(err);
    }
    if (!runstate_is_running() && !qatomic_read(&pcow->flushes) &&
        !pcow->changing && !pcow->outgoing && !qemu_system_dump_in_progress()) {
        pcow->backend->mr.ram_block->pcow = NULL;
        hostmem_pcow_remove_place(pcow);
        close_image(pcow);
    }
}

bool hostmem_pcow_alloc(HostMemPcow *pcow, HostMemoryBackend *backend,
                        const char *path, bool readonly, uint64_t align,
                        uint64_t offset, bool discard_data, Error **errp)
{
    g_autofree char *name = host_memory_backend_get_name(backend);
    RAMBlock *block;

    if (!check_options(pcow, backend, path, align, offset, discard_data,
                       errp)) {
        return false;
    }
    /*
     * Pages are replaced under the mapping, as by a discard that nobody
     * coordinates: what pins guest memory (vfio, vdpa) would go on with the
     * old ones.
     */
    if (ram_block_discard_require(true) < 0) {
        error_setg(errp, "pcow image '%s' cannot be used together with "
                   "devices that pin guest memory (vfio, vdpa)", path);
        return false;
    }
    pcow->discard_blocked = true;
    pcow->backend = backend;
    pcow->readonly = readonly;
    pcow->plugged = phase_check(PHASE_MACHINE_READY);
    if (!open_image(pcow, path, errp) ||
        !hostmem_pcow_check_arrived(pcow, errp) ||
        !hostmem_pcow_check_plug(pcow, errp) || !check_vhost(pcow, errp) ||
        !start_events(pcow, errp)) {
        close_image(pcow);
        return false;
    }
    ignore_options(backend, path);
    backend->size = pcow_size(pcow->image);
    backend->aligned = true;

    memory_region_init_ram_ptr(&backend->mr, OBJECT(backend), name,
                               backend->size, pcow_map_address(pcow->map));
    backend->mr.align = PCOW_SLAB_SIZE;
    memory_region_set_readonly(&backend->mr, readonly);
    block = backend->mr.ram_block;
    block->flags |= RAM_SHARED | (readonly ? RAM_READONLY : 0);
    block->pcow = pcow;
    hostmem_pcow_add_place(pcow, block->host, block->max_length);
    blk_prepare_buffer = hostmem_pcow_co_prepare_buffer;
    blk_may_retry = hostmem_pcow_may_retry;
    blk_begin_buffer = hostmem_pcow_begin_request;
    blk_end_buffer = hostmem_pcow_end_request;

    pcow->id = g_strdup(object_get_canonical_path_component(OBJECT(backend)));
    pcow->exit.notify = exit_notify;
    qemu_add_exit_notifier(&pcow->exit);
    hostmem_pcow_vmstate_register(pcow);
    hostmem_pcow_loadvm_register(pcow);
    hostmem_pcow_migration_register(pcow);
    return true;
}

void hostmem_pcow_finalize(HostMemPcow *pcow)
{
    if (pcow->map) {
        hostmem_pcow_remove_place(pcow);
        hostmem_pcow_migration_unregister(pcow);
        hostmem_pcow_loadvm_unregister(pcow);
        hostmem_pcow_vmstate_unregister(pcow);
        qemu_remove_exit_notifier(&pcow->exit);
    }
    close_image(pcow);
    if (pcow->discard_blocked) {
        ram_block_discard_require(false);
    }
    g_free(pcow->id);
}

typedef struct ForeachArgs {
    HostMemPcowFn *fn;
    void *opaque;
    Error **errp;
    bool ok;
} ForeachArgs;

static int foreach_object(Object *obj, void *opaque)
{
    ForeachArgs *args = opaque;
    HostMemPcow *pcow;

    if (!object_dynamic_cast(obj, TYPE_MEMORY_BACKEND_FILE)) {
        return 0;
    }
    pcow = hostmem_file_get_pcow(obj);
    if (!pcow->map) {
        return 0;
    }
    args->ok = args->fn(pcow, args->opaque, args->errp);
    return !args->ok;
}

bool hostmem_pcow_foreach(HostMemPcowFn *fn, void *opaque, Error **errp)
{
    ForeachArgs args = { fn, opaque, errp, true };

    object_child_foreach(object_get_objects_root(), foreach_object, &args);
    return args.ok;
}

static bool refuse_fd_user(HostMemPcow *pcow, void *opaque, Error **errp)
{
    error_setg(errp, "%s cannot be used together with the pcow image '%s' "
               "(memory backend '%s'), whose pages change their place in the "
               "file; use an emulated device, or a raw memory file",
               (const char *)opaque, pcow_path(pcow->image), pcow->id);
    return false;
}

bool hostmem_pcow_check_no_fd_user(const char *user, Error **errp)
{
    return hostmem_pcow_foreach(refuse_fd_user, (void *)user, errp);
}

bool hostmem_pcow_check_nvdimm(HostMemPcow *pcow, bool told_volatile,
                               Error **errp)
{
    struct pcow_info info;

    pcow_get_info(pcow->image, &info);
    /*
     * A pool in DRAM was made by somebody who knows that it is gone with the
     * host.  A pool on a disk looks as if it kept what the guest has flushed.
     */
    if (told_volatile || pcow->readonly ||
        info.persistence != PCOW_PERSISTENCE_PAGE_CACHE) {
        return true;
    }
    error_setg(errp, "an nvdimm on the pcow image '%s' would promise the guest "
               "that what it has flushed is durable, but its pool is page "
               "cache: a crash of the host may lose it", pcow_path(pcow->image));
    error_append_hint(errp, "Use -device virtio-pmem-pci, whose flush reaches "
                      "the disk; or a pool on fsdax; or say pcow-volatile=on "
                      "if the data may be lost with the host; or unarmed=on "
                      "for a device that the guest only reads.\n");
    return false;
}

static bool refuse_vhost(HostMemPcow *pcow, void *opaque, Error **errp)
{
    error_setg(errp, "vhost cannot be used together with the pcow image '%s' "
               "(memory backend '%s'): the host kernel cannot store to pages "
               "that must be copied first, and cannot ask QEMU to do so for "
               "this device; use a device that QEMU emulates (vhost=off)",
               pcow_path(pcow->image), pcow->id);
    return false;
}

bool hostmem_pcow_check_no_vhost(Error **errp)
{
    return hostmem_pcow_foreach(refuse_vhost, NULL, errp);
}

static int get_format(Object *obj, Error **errp)
{
    return hostmem_file_get_pcow(obj)->format;
}

static void set_format(Object *obj, int value, Error **errp)
{
    if (host_memory_backend_mr_inited(MEMORY_BACKEND(obj))) {
        error_setg(errp, "cannot change property 'format'");
        return;
    }
    hostmem_file_get_pcow(obj)->format = value;
}

static int get_engine(Object *obj, Error **errp)
{
    return hostmem_file_get_pcow(obj)->engine;
}

static void set_engine(Object *obj, int value, Error **errp)
{
    if (host_memory_backend_mr_inited(MEMORY_BACKEND(obj))) {
        error_setg(errp, "cannot change property 'pcow-engine'");
        return;
    }
    hostmem_file_get_pcow(obj)->engine = value;
}

static int get_full(Object *obj, Error **errp)
{
    return hostmem_file_get_pcow(obj)->full;
}

static void set_full(Object *obj, int value, Error **errp)
{
    if (host_memory_backend_mr_inited(MEMORY_BACKEND(obj))) {
        error_setg(errp, "cannot change property 'pcow-full'");
        return;
    }
    hostmem_file_get_pcow(obj)->full = value;
}

void hostmem_pcow_class_init(ObjectClass *oc)
{
    object_class_property_add_enum(oc, "format", "HostMemFormat",
                                   &HostMemFormat_lookup,
                                   get_format, set_format);
    object_class_property_set_description(oc, "format",
        "raw, pcow, or auto: pcow if mem-path ends in .pcow, whose contents a "
        "live migration takes along");
    object_class_property_add_enum(oc, "pcow-engine", "HostMemPcowEngine",
                                   &HostMemPcowEngine_lookup,
                                   get_engine, set_engine);
    object_class_property_set_description(oc, "pcow-engine",
        "How accesses to pages not yet in the pcow image are caught");
    object_class_property_add_enum(oc, "pcow-full", "HostMemPcowFull",
                                   &HostMemPcowFull_lookup,
                                   get_full, set_full);
    object_class_property_set_description(oc, "pcow-full",
        "What a store does that finds the pool of the pcow image full");
    hostmem_pcow_space_class_init(oc);
    hostmem_pcow_places_init();
}
