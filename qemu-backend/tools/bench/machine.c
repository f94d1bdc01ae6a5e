/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine.h"

#include <inttypes.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "threads.h"

#define XFS_MAGIC 0x58465342

static void first_line(const char *path, char *text, size_t size)
{
    FILE *file = fopen(path, "re");

    if (!file || !fgets(text, (int)size, file)) {
        text[0] = '\0';
    }
    text[strcspn(text, "\n")] = '\0';
    if (file) {
        fclose(file);
    }
}

static void read_cpu(char *text, size_t size)
{
    FILE *file = fopen("/proc/cpuinfo", "re");
    char line[512];

    snprintf(text, size, "unknown");
    while (file && fgets(line, sizeof(line), file)) {
        const char *colon = strchr(line, ':');

        if (colon && !strncmp(line, "model name", 10)) {
            snprintf(text, size, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
            break;
        }
    }
    if (file) {
        fclose(file);
    }
}

static const char *file_system_name(const char *path, char *buffer, size_t size)
{
    struct statfs fs;

    if (statfs(path, &fs)) {
        return "unknown";
    }
    switch ((uint32_t)fs.f_type) {
    case TMPFS_MAGIC: return "tmpfs";
    case EXT4_SUPER_MAGIC: return "ext4";
    case XFS_MAGIC: return "xfs";
    default:
        snprintf(buffer, size, "0x%x", (uint32_t)fs.f_type);
        return buffer;
    }
}

uint64_t memory_available(void)
{
    FILE *file = fopen("/proc/meminfo", "re");
    char line[128];
    uint64_t kib = UINT64_MAX >> 10;

    while (file && fgets(line, sizeof(line), file)) {
        if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1) {
            break;
        }
    }
    if (file) {
        fclose(file);
    }
    return kib << 10;
}

void machine_describe(const struct bench *bench, struct machine *machine)
{
    struct utsname name;
    char text[32];

    *machine = (struct machine){
        .cores = usable_cpus(),
        .memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE)};
    read_cpu(machine->cpu, sizeof(machine->cpu));
    if (uname(&name) == 0) {
        snprintf(machine->kernel, sizeof(machine->kernel), "%s %s %s", name.sysname, name.release,
                 name.machine);
    }
    first_line("/proc/sys/vm/max_map_count", text, sizeof(text));
    if (sscanf(text, "%u", &machine->max_map_count) != 1) {
        machine->max_map_count = 0;
    }
    first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled", machine->shmem_huge,
               sizeof(machine->shmem_huge));
    snprintf(machine->pool_file_system, sizeof(machine->pool_file_system), "%s",
             file_system_name(bench->pool, text, sizeof(text)));
}
