#!/bin/bash
# The first process of new mount, PID, cgroup, IPC and UTS namespaces: makes a throw-away copy of the machine's files
# over an overlay and becomes its systemd. Arguments: an empty directory, and pairs SOURCE TARGET to bind into the copy.
#
# Nothing that happens inside reaches the machine's own files, devices, kernel settings or /run. The network is shared.
set -euo pipefail
work=$1
shift
mount -t tmpfs -o size=4g tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$work/root"
root=$work/root

mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=0755 tmpfs "$root/run"
mount -t tmpfs -o mode=0755 tmpfs "$root/dev"
for node in null zero full random urandom tty; do
    touch "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
mkdir "$root/dev/pts" "$root/dev/shm" "$root/run/lock"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
mount -t tmpfs tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"

while (($# > 1)); do
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    shift 2
done

# What would empty /tmp, load modules, set the kernel, look for devices or wait for a terminal or a network.
mkdir -p "$root/run/systemd/system"
for unit in systemd-tmpfiles-setup.service systemd-tmpfiles-setup-dev.service systemd-tmpfiles-clean.service \
    systemd-tmpfiles-clean.timer systemd-sysctl.service systemd-modules-load.service systemd-random-seed.service \
    systemd-udevd.service systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-udev-trigger.service \
    systemd-hwdb-update.service systemd-binfmt.service systemd-remount-fs.service systemd-machine-id-commit.service \
    systemd-firstboot.service systemd-timesyncd.service systemd-networkd.service systemd-resolved.service \
    systemd-logind.service networking.service console-getty.service getty.target; do
    ln -sf /dev/null "$root/run/systemd/system/$unit"
done
mkdir -p "$root/var/log/journal" # so that records outlive the runtime's small bounds
# Units of the machine are left alone: only what the tests start runs.
cat >"$root/run/systemd/system/for-tests.target" <<'UNIT'
[Unit]
Requires=basic.target
After=basic.target
AllowIsolate=yes
UNIT

# Not chroot: PrivateUsers= is refused inside of one.
mkdir -p "$root/.machine"
cd "$root"
pivot_root . .machine
cd /
umount -l /.machine
# Everything here is private by now. Services get their own namespaces from this one, and credentials by propagation.
mount --make-rshared /
exec /usr/bin/env -i container=tests PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /usr/lib/systemd/systemd --system --unit=for-tests.target --show-status=0 --log-target=journal
