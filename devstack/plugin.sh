#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# devstack plugin: "enable_plugin pcow URL" in local.conf; settings are in devstack/settings.

PCOW_DIR=${PCOW_DIR:-$DEST/pcow}
PCOW_TMPFS=$DATA_DIR/pcow-pools

function pcow_pool_dir {
    echo "${PCOW_POOL_DIR:-$PCOW_TMPFS}"
}

# The programs go into $PCOW_PREFIX, the drivers into the environment of the services.
function install_pcow {
    sudo PCOW_CACHE_DIR="$DATA_DIR/pcow-cache" "$PCOW_DIR/tools/build"
    sudo install -d "$PCOW_PREFIX/bin"
    local program
    for program in pcow-img pcow-io qemu-system-x86_64; do
        sudo install "$PCOW_DIR/build/bin/$program" "$PCOW_PREFIX/bin/$program"
    done
    sudo install -D -m 644 -t "$PCOW_PREFIX/share/pcow-boot-shim" "$PCOW_DIR"/build/share/pcow-boot-shim/*
    # where nbdkit itself looks for plugins
    sudo install "$PCOW_DIR/build/bin/nbdkit-pcow-plugin.so" "$(nbdkit --dump-config | sed -n 's/^plugindir=//p')/"
    setup_install "$PCOW_DIR"
}

# configure_pcow_options FILE: the group [pcow] of a service.
function configure_pcow_options {
    iniset "$1" pcow state_path "$DATA_DIR/pcow"
    iniset "$1" pcow conversion_dir "$DATA_DIR/pcow-conversion"
    iniset "$1" pcow pcow_img "$PCOW_PREFIX/bin/pcow-img"
    iniset "$1" pcow emulator "$PCOW_PREFIX/bin/qemu-system-x86_64"
    iniset "$1" pcow boot_shim "$PCOW_PREFIX/share/pcow-boot-shim"
}

function configure_pcow {
    local pools
    pools=$(pcow_pool_dir)
    sudo install -d -o "$STACK_USER" "$DATA_DIR/pcow" "$DATA_DIR/pcow-conversion" "$pools" /etc/pcow
    if [[ -z $PCOW_POOL_DIR ]] && ! mountpoint -q "$pools"; then
        sudo mount -t tmpfs -o "size=$PCOW_POOL_SIZE,mode=0755,uid=$(id -u "$STACK_USER")" pcow-pools "$pools"
    fi
    sudo touch /etc/pcow/pcow.conf
    sudo chown "$STACK_USER" /etc/pcow/pcow.conf
    configure_pcow_options /etc/pcow/pcow.conf
    if is_service_enabled n-cpu; then
        configure_pcow_options "$NOVA_CPU_CONF"
        iniset "$NOVA_CPU_CONF" DEFAULT compute_driver nova_pcow.driver.PcowLibvirtDriver
        iniset "$NOVA_CPU_CONF" nova_pcow pools "$PCOW_NOVA_POOL"
        create_pcow_pool "$PCOW_NOVA_POOL"
    fi
    if is_service_enabled c-api c-sch c-vol; then
        # no other host's cinder-backup can attach a volume
        iniset "$CINDER_CONF" DEFAULT backup_use_same_host True
    fi
    if is_service_enabled c-vol; then
        configure_pcow_options "$CINDER_CONF"
        # [pcow] is the group above; the section of the backend has the name of the volume type
        iniset "$CINDER_CONF" pcow-pmem volume_driver cinder_pcow.driver.PcowDriver
        iniset "$CINDER_CONF" pcow-pmem volume_backend_name pcow
        iniset "$CINDER_CONF" pcow-pmem pcow_pools "$PCOW_CINDER_POOL"
        local backends
        backends=$(iniget "$CINDER_CONF" DEFAULT enabled_backends)
        case ",$backends," in
        *,pcow-pmem,*) ;;
        *) iniset "$CINDER_CONF" DEFAULT enabled_backends "${backends:+$backends,}pcow-pmem" ;;
        esac
        create_pcow_pool "$PCOW_CINDER_POOL"
        # os-brick looks at what cinder-volume, which is not root, shows it with root's rights
        grep -qx user_allow_other /etc/fuse.conf || echo user_allow_other | sudo tee -a /etc/fuse.conf
    fi
}

# create_pcow_pool NAME: unless it is there.
function create_pcow_pool {
    local directory
    directory=$(pcow_pool_dir)/$1
    [[ -e $directory/.pcow-pool ]] && return 0
    mkdir -p "$directory"
    pcowctl --config-file /etc/pcow/pcow.conf pool create "$1" "$directory"
}

function create_pcow_volume_type {
    openstack --os-cloud devstack-admin volume type show pcow-pmem >/dev/null 2>&1 ||
        openstack --os-cloud devstack-admin volume type create pcow-pmem --property volume_backend_name=pcow
}

function unstack_pcow {
    if [[ -z $PCOW_POOL_DIR ]] && mountpoint -q "$PCOW_TMPFS"; then
        sudo umount "$PCOW_TMPFS"
    fi
}

function cleanup_pcow {
    unstack_pcow
    sudo rm -rf "$DATA_DIR/pcow" "$DATA_DIR/pcow-conversion" "$DATA_DIR/pcow-cache" /etc/pcow/pcow.conf
}

if is_service_enabled pcow; then
    case "$1 ${2:-}" in
    "stack install") install_pcow ;;
    "stack post-config") configure_pcow ;;
    "stack extra") if is_service_enabled c-vol; then create_pcow_volume_type; fi ;;
    "unstack ") unstack_pcow ;;
    "clean ") cleanup_pcow ;;
    esac
fi
