#!/bin/bash
# Boot a Debian guest with a kernel NFS server and two NFS clients: nfs_guest.sh DIR OPTIONS JOB FOLDER...
#
# DIR keeps the guest's image, which is built once (3 minutes, 1.3 GB). OPTIONS are those of the mounts (vers=4.2).
# JOB is a bash script; it runs in the guest with /mnt/m1 and /mnt/m2 mounted, the server's disk at /export and /out
# for its results, which come back as DIR/out. FOLDERs are mounted read-only at their own paths. Root only.
set -euo pipefail
dir=$(realpath -m "$1") options=$2 job=$(realpath "$3")
shift 3
disk_mb=${DISK_MB:-4096} memory=${MEMORY:-4G} timeout_s=${TIMEOUT_S:-3000}

build() {
    local tree=$dir/tree
    rm -rf "$tree"
    cat > "$dir/setup.sh" <<'EOF'
mkdir -p "$1/etc/initramfs-tools/conf.d"
printf 'MODULES=list\nRESUME=none\n' > "$1/etc/initramfs-tools/conf.d/guest"
printf '%s\n' virtio_pci virtio_blk ext4 9p 9pnet_virtio > "$1/etc/initramfs-tools/modules"
EOF
    mmdebstrap --variant=minbase --aptopt='APT::Install-Recommends "false"' --setup-hook="sh $dir/setup.sh \"\$1\"" \
        --include=linux-image-amd64,initramfs-tools,zstd,kmod,procps,iproute2,e2fsprogs,python3,nfs-kernel-server,nfs-common,redis-server,libgomp1,libnuma1 \
        bookworm "$tree" >&2
    cat > "$tree/sbin/guest-init" <<'EOF'
#!/bin/sh
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
modprobe -a 9pnet_virtio 9p; mkdir -p /rig; mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 rig /rig
exec /bin/bash /rig/init
EOF
    chmod 755 "$tree/sbin/guest-init"
    cp "$tree"/boot/vmlinuz-* "$dir/vmlinuz"
    cp "$tree"/boot/initrd.img-* "$dir/initrd"
    truncate -s 4G "$dir/new.ext4"
    mke2fs -q -F -t ext4 -O ^has_journal -d "$tree" "$dir/new.ext4"
    rm -rf "$tree"
    mv "$dir/new.ext4" "$dir/root.ext4"
}

mkdir -p "$dir"
[[ -e $dir/root.ext4 ]] || build
rig=$(mktemp -d "$dir/rig.XXXXXX")
guest=
# A signal ends the guest as well: bash runs a trap only while it waits, so the guest runs in the background.
trap '[[ -z $guest ]] || { kill "$guest"; wait "$guest"; } 2> /dev/null || true; rm -rf "$rig"' EXIT
trap 'exit 143' TERM INT HUP
mkdir "$rig/out"
cp "$job" "$rig/job"

cat > "$rig/init" <<'EOF'
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
for at in /tmp /run /dev/shm; do mkdir -p $at; mount -t tmpfs tmpfs $at; done
mkdir -p /run/netns /run/rpcbind /var/lib/nfs/rpc_pipefs /export
hostname server; ip link set lo up
while read -r tag path; do
    mkdir -p "$path"; mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro "$tag" "$path"
done < /rig/shares
modprobe -q virtio_console
for _ in $(seq 50); do [[ -e /dev/vport0p1 || -e /dev/vport1p1 || -e /dev/vport2p1 ]] && break; sleep 0.1; done
bash /rig/main > /dev/vport*p1 2>&1 < /dev/null
echo $? > /rig/status; sync; echo b > /proc/sysrq-trigger; sleep 60
EOF
cat > "$rig/main" <<EOF
set -e
mkfs.ext4 -q -F -m 0 /dev/vdb; mount /dev/vdb /export; mkdir -p /export/kv
modprobe -a nfsd nfs; mount -t nfsd nfsd /proc/fs/nfsd || true; mount -t rpc_pipefs sunrpc /var/lib/nfs/rpc_pipefs || true
rpcbind -w; rpc.statd --no-notify; nfsdcld
echo '/export *(rw,sync,no_root_squash,no_subtree_check,fsid=0)' > /etc/exports
exportfs -ra; rpc.mountd; rpc.nfsd -G 10 -L 10 8
path=/kv; [[ $options == *vers=3* ]] && path=/export/kv
for n in 1 2; do
    # NFSv4 tells clients apart by host name, so each node has its own.
    ip netns add n\$n; ip link add s\$n type veth peer name c\$n; ip link set c\$n netns n\$n
    ip addr add 10.7.\$n.1/24 dev s\$n; ip link set s\$n up; ip -n n\$n link set lo up
    ip -n n\$n addr add 10.7.\$n.2/24 dev c\$n; ip -n n\$n link set c\$n up
    touch /run/uts\$n; unshare --uts=/run/uts\$n hostname node\$n; mkdir -p /mnt/m\$n
    nsenter --net=/run/netns/n\$n --uts=/run/uts\$n mount -t nfs -o "$options" 10.7.\$n.1:\$path /mnt/m\$n
done
ln -s /rig/out /out
exec bash /rig/job
EOF

shares=(-virtfs "local,path=$rig,mount_tag=rig,security_model=none,id=rig")
n=0
: > "$rig/shares"
for folder in "$@"; do
    n=$((n + 1))
    echo "share$n $folder" >> "$rig/shares"
    shares+=(-virtfs "local,path=$folder,mount_tag=share$n,security_model=none,readonly=on,id=share$n,multidevs=remap")
done
truncate -s "${disk_mb}M" "$rig/disk"
# The image is never changed (snapshot=on). Emulated: a guest needs no /dev/kvm. pdeathsig: it also ends if this script
# is killed, or `timeout` is ended just after it forked, when it passes no signal on.
TMPDIR=$rig setpriv --pdeathsig TERM timeout -k 5 "$timeout_s" \
    setpriv --pdeathsig TERM qemu-system-x86_64 -M q35 -accel tcg,thread=multi -cpu max -smp 2 -m "$memory" \
    -nodefaults -no-reboot -display none -kernel "$dir/vmlinuz" -initrd "$dir/initrd" \
    -append "root=/dev/vda rw console=ttyS0 init=/sbin/guest-init quiet panic=-1 mitigations=off" \
    -serial "file:$dir/console" -device virtio-serial -chardev file,id=out,path=/dev/fd/1,append=on \
    -device virtserialport,chardev=out,name=out \
    -drive "file=$dir/root.ext4,if=virtio,format=raw,snapshot=on" \
    -drive "file=$rig/disk,if=virtio,format=raw,cache=unsafe,discard=unmap" \
    -object rng-random,id=rng,filename=/dev/urandom -device virtio-rng,rng=rng "${shares[@]}" \
    < /dev/null > >(cat) &
guest=$!
wait "$guest" || true
guest=
rm -rf "$dir/out"
cp -r "$rig/out" "$dir/out"
if [[ ! -e $rig/status ]]; then
    echo "the guest did not end its job; its console:" >&2
    tail -20 "$dir/console" >&2
    exit 124
fi
exit "$(< "$rig/status")"
