# Part of init: soft-RoCE devices rxe0 to rxe3 over two veth pairs.

# cable N makes the veth pair pNa–pNb with the addresses 10.88.N.1 and .2. Each end gets an rxe device. MTU 4200 has room for
# RoCE's 4096 bytes and headers. The neighbour entries are static, because an end does not answer ARP for an address that is
# local to the machine.
cable() {
	a=p$1a b=p$1b
	must ip link add $a mtu 4200 type veth peer name $b mtu 4200
	for side in "$a 10.88.$1.1 $b 10.88.$1.2" "$b 10.88.$1.2 $a 10.88.$1.1"; do
		set -- $1 $side
		sysctl -qw net.ipv4.conf.$2.accept_local=1 net.ipv4.conf.$2.rp_filter=0 net.ipv6.conf.$2.addr_gen_mode=1
		must ip addr add $3/24 dev $2
		must ip link set $2 up
	done
	for side in "$a 10.88.$1.1 $b 10.88.$1.2" "$b 10.88.$1.2 $a 10.88.$1.1"; do
		set -- $1 $side
		must ip neigh replace $5 lladdr "$(cat /sys/class/net/$4/address)" dev $2 nud permanent
		# Packets to the other end leave by the veth device. Packets that arrive on it are delivered locally.
		must ip route replace $5 dev $2 src $3 table 1$1
		must ip rule add pref 10 from $3 to $5 table 1$1
		must ip rule add pref 5 iif $2 lookup local
	done
}
sysctl -qw net.ipv4.conf.all.rp_filter=0
cable 0
cable 1
ip rule add pref 20 lookup local
ip rule del pref 0
i=0
for dev in p0a p0b p1a p1b; do
	must rdma link add rxe$i type rxe netdev $dev
	i=$((i + 1))
done
[ -e /dev/infiniband/uverbs0 ] || off broken "setup failed: no /dev/infiniband/uverbs0"
