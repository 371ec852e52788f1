# What the peers' users complain of, and what check says to it.

host dgx-h100.host
file class/infiniband/mlx5_4/ports/1/state "1: DOWN"
file class/infiniband/mlx5_4/ports/1/phys_state "2: Polling"
file class/infiniband/mlx5_5/ports/1/rate "200 Gb/sec (4X HDR)"
gone class/infiniband/mlx5_7/ports/1/gids/3
file class/net/ens1f1np1/mtu 1500
file devices/pci0000:d9/0000:d9:01.0/0000:da:00.0/0000:db:00.0/0000:dc:00.0/current_link_width 8
gone module/nvidia_peermem
gone module/ib_uverbs
----

facts
memlock 8388608
kernel 5.4.0-100
device mlx5_0 open /dev/infiniband/uverbs0: permission denied
counter ens6f0np0 rx_prio3_pause 10 10
counter ens6f0np0 tx_prio3_pause 10 110
counter ens6f0np0 rx_prio3_packets 10 1000
counter ens6f1np1 rx_prio1_pause 10 12
----

check
----
fail  host     module       ib_uverbs is not loaded: programs can't open RDMA devices
                            → modprobe ib_uverbs
fail  host     memlock      8192 KiB may be locked: RDMA memory can't be registered
                            → LimitMEMLOCK=infinity in the unit, memlock in /etc/security/limits.conf, or --ulimit memlock=-1 for the container
fail  host     gpu-memory   NICs can't reach GPU memory: nvidia_peermem is not loaded, and kernel 5.4.0-100 has no dma-buf for RDMA
                            → modprobe nvidia_peermem
fail  mlx5_0   device       open /dev/infiniband/uverbs0: permission denied
                            → let the user in (group rdma), or pass /dev/infiniband into the container
fail  mlx5_4   port-down    port is down (Polling)
                            → look at the cable, the transceiver and the switch's port
fail  mlx5_5   rate         200 Gb/s instead of 400, as mlx5_0, the same model, does
                            → look at the cable and the switch's port (mlxlink -d 0000:5e:00.0 shows what was negotiated, and errors)
fail  mlx5_7   gid          no RoCE v2 GID
                            → give ens1f0np0 an IP address
fail  mlx5_11  pcie         PCIe at 32 GT/s x8 carries 252 Gb/s, the port 400
                            → seat the card anew, look at the slot's width and at the BIOS's PCIe setting
warn  mlx5_1   pause        tx_prio3_pause of ens6f0np0 grew by 100 in 1s
                            → the peers send faster than this host takes: lower the windows, look at NUMA and PCIe; then at the buffers (mlnx_qos)
warn  mlx5_2   pause        rx_prio1_pause of ens6f1np1 grew by 2 in 1s
                            → the switch holds this host back: look for the congested port behind it, and whether ECN and DCQCN are on there
warn  mlx5_8   mtu          MTU of 1500: RoCE packets carry 1024 bytes instead of 4096
                            → ip link set dev ens1f1np1 mtu 9000, if the switches carry it
warn  mlx5_8   mtu-differs  MTU of 1500, mlx5_1 of the same role has 9000
                            → ip link set dev ens1f1np1 mtu 9000
warn  gpu2     gpu-nic      its own NIC mlx5_4 is not usable; mlx5_0 stands in, on NUMA node 0
                            → mend mlx5_4

list
----
----
NIC      KIND  ROLE  STATE                   RATE      NUMA  PCI      NETDEV     ADDRESS                 GPU        REASON
mlx5_0   ib    cnic  active                  400 Gb/s  0     18:00.0  ibp24s0    0 fe80::a088:c203:1:18  gpu0 gpu2  under PCIe switch 16:00.0, as gpu0
mlx5_1   roce  snic  active                  200 Gb/s  0     29:00.0  ens6f0np0  3 10.10.0.1             -          under no GPU's PCIe switch
mlx5_2   roce  snic  active                  200 Gb/s  0     29:00.1  ens6f1np1  3 10.10.1.1             -          under no GPU's PCIe switch
mlx5_3   ib    cnic  active                  400 Gb/s  0     40:00.0  ibp64s0    0 fe80::a088:c203:1:40  gpu1       under PCIe switch 3e:00.0, as gpu1
mlx5_4   ib    cnic  port is down (Polling)  -         0     4f:00.0  ibp79s0    0 fe80::a088:c203:1:4f  -          under PCIe switch 4d:00.0, as gpu2
mlx5_5   ib    cnic  active                  200 Gb/s  0     5e:00.0  ibp94s0    0 fe80::a088:c203:1:5e  gpu3       under PCIe switch 5c:00.0, as gpu3
mlx5_6   ib    cnic  active                  400 Gb/s  1     9a:00.0  ibp154s0   0 fe80::a088:c203:1:9a  gpu4       under PCIe switch 98:00.0, as gpu4
mlx5_7   roce  snic  no RoCE v2 GID          200 Gb/s  1     aa:00.0  ens1f0np0  -                       -          under no GPU's PCIe switch
mlx5_8   roce  snic  active                  200 Gb/s  1     aa:00.1  ens1f1np1  3 10.10.3.1             -          under no GPU's PCIe switch
mlx5_9   ib    cnic  active                  400 Gb/s  1     c0:00.0  ibp192s0   0 fe80::a088:c203:1:c0  gpu5       under PCIe switch be:00.0, as gpu5
mlx5_10  ib    cnic  active                  400 Gb/s  1     ce:00.0  ibp206s0   0 fe80::a088:c203:1:ce  gpu6       under PCIe switch cc:00.0, as gpu6
mlx5_11  ib    cnic  active                  400 Gb/s  1     dc:00.0  ibp220s0   0 fe80::a088:c203:1:dc  gpu7       under PCIe switch da:00.0, as gpu7
eno3     tcp   none  up                      1 Gb/s    0     64:00.0  eno3       -                       -          RDMA reaches storage

GPU   MODEL  NUMA  PCI      NICS     DISTANCE  REASON
gpu0  -      0     1b:00.0  mlx5_0   switch    under PCIe switch 16:00.0
gpu1  -      0     43:00.0  mlx5_3   switch    under PCIe switch 3e:00.0
gpu2  -      0     52:00.0  mlx5_0   numa      on NUMA node 0
gpu3  -      0     61:00.0  mlx5_5   switch    under PCIe switch 5c:00.0
gpu4  -      1     9d:00.0  mlx5_6   switch    under PCIe switch 98:00.0
gpu5  -      1     c3:00.0  mlx5_9   switch    under PCIe switch be:00.0
gpu6  -      1     d1:00.0  mlx5_10  switch    under PCIe switch cc:00.0
gpu7  -      1     df:00.0  mlx5_11  switch    under PCIe switch da:00.0

not listed, virtual: docker0
----
----

choose nic=mlx5_4
----
----
topo: no use of mlx5_4: port is down (Polling); `penstock nic check` says what to do. This host has:
NIC      KIND  ROLE  STATE                   RATE      NUMA  PCI      NETDEV     ADDRESS                 GPU        REASON
mlx5_0   ib    cnic  active                  400 Gb/s  0     18:00.0  ibp24s0    0 fe80::a088:c203:1:18  gpu0 gpu2  under PCIe switch 16:00.0, as gpu0
mlx5_1   roce  snic  active                  200 Gb/s  0     29:00.0  ens6f0np0  3 10.10.0.1             -          under no GPU's PCIe switch
mlx5_2   roce  snic  active                  200 Gb/s  0     29:00.1  ens6f1np1  3 10.10.1.1             -          under no GPU's PCIe switch
mlx5_3   ib    cnic  active                  400 Gb/s  0     40:00.0  ibp64s0    0 fe80::a088:c203:1:40  gpu1       under PCIe switch 3e:00.0, as gpu1
mlx5_4   ib    cnic  port is down (Polling)  -         0     4f:00.0  ibp79s0    0 fe80::a088:c203:1:4f  -          under PCIe switch 4d:00.0, as gpu2
mlx5_5   ib    cnic  active                  200 Gb/s  0     5e:00.0  ibp94s0    0 fe80::a088:c203:1:5e  gpu3       under PCIe switch 5c:00.0, as gpu3
mlx5_6   ib    cnic  active                  400 Gb/s  1     9a:00.0  ibp154s0   0 fe80::a088:c203:1:9a  gpu4       under PCIe switch 98:00.0, as gpu4
mlx5_7   roce  snic  no RoCE v2 GID          200 Gb/s  1     aa:00.0  ens1f0np0  -                       -          under no GPU's PCIe switch
mlx5_8   roce  snic  active                  200 Gb/s  1     aa:00.1  ens1f1np1  3 10.10.3.1             -          under no GPU's PCIe switch
mlx5_9   ib    cnic  active                  400 Gb/s  1     c0:00.0  ibp192s0   0 fe80::a088:c203:1:c0  gpu5       under PCIe switch be:00.0, as gpu5
mlx5_10  ib    cnic  active                  400 Gb/s  1     ce:00.0  ibp206s0   0 fe80::a088:c203:1:ce  gpu6       under PCIe switch cc:00.0, as gpu6
mlx5_11  ib    cnic  active                  400 Gb/s  1     dc:00.0  ibp220s0   0 fe80::a088:c203:1:dc  gpu7       under PCIe switch da:00.0, as gpu7
eno3     tcp   none  up                      1 Gb/s    0     64:00.0  eno3       -                       -          RDMA reaches storage

GPU   MODEL  NUMA  PCI      NICS     DISTANCE  REASON
gpu0  -      0     1b:00.0  mlx5_0   switch    under PCIe switch 16:00.0
gpu1  -      0     43:00.0  mlx5_3   switch    under PCIe switch 3e:00.0
gpu2  -      0     52:00.0  mlx5_0   numa      on NUMA node 0
gpu3  -      0     61:00.0  mlx5_5   switch    under PCIe switch 5c:00.0
gpu4  -      1     9d:00.0  mlx5_6   switch    under PCIe switch 98:00.0
gpu5  -      1     c3:00.0  mlx5_9   switch    under PCIe switch be:00.0
gpu6  -      1     d1:00.0  mlx5_10  switch    under PCIe switch cc:00.0
gpu7  -      1     df:00.0  mlx5_11  switch    under PCIe switch da:00.0

not listed, virtual: docker0
----
----

# No subnet manager; every GPU's NIC lost.
host
gpu at=15/15:01.0/16:00.0/1b:00.0 numa=0
rdma mlx5_0 at=15/15:01.0/16:00.0/18:00.0 numa=0 state="2: INIT" gid=0,fe80::1
module ib_uverbs
module nvidia
module nvidia_peermem
----

list
----
----
NIC     KIND  ROLE    STATE         RATE  NUMA  PCI      NETDEV  ADDRESS    GPU  REASON
mlx5_0  ib    shared  port is init  -     0     18:00.0  -       0 fe80::1  -    under PCIe switch 16:00.0, as gpu0; no other NIC reaches storage

GPU   MODEL  NUMA  PCI      NICS  DISTANCE  REASON
gpu0  -      0     1b:00.0  -     -         no usable NIC
----
----

check
----
fail  host    no-nic     no NIC can be used
                         → mend the findings below; in a container, pass the devices in (/dev/infiniband, the host's network)
fail  mlx5_0  port-down  port is init
                         → the link is there and no subnet manager has set the port up: start opensm
fail  gpu0    gpu-nic    no usable NIC
                         → mend the NICs of role cnic

choose gpu=gpu0
----
----
topo: no usable NIC for gpu0; `penstock nic check` says what to do. This host has:
NIC     KIND  ROLE    STATE         RATE  NUMA  PCI      NETDEV  ADDRESS    GPU  REASON
mlx5_0  ib    shared  port is init  -     0     18:00.0  -       0 fe80::1  -    under PCIe switch 16:00.0, as gpu0; no other NIC reaches storage

GPU   MODEL  NUMA  PCI      NICS  DISTANCE  REASON
gpu0  -      0     1b:00.0  -     -         no usable NIC
----
----

# One NIC for eight GPUs on two sockets, none behind a common switch.
host
gpu at=15/15:01.0/1b:00.0 numa=0
gpu at=15/15:02.0/1c:00.0 numa=0
gpu at=97/97:01.0/9b:00.0 numa=1
rdma mlx5_0 at=20/20:01.0/21:00.0 numa=0 gid=0,fe80::1
module ib_uverbs
module nvidia
module nvidia_peermem
----

list
----
----
NIC     KIND  ROLE    STATE   RATE      NUMA  PCI      NETDEV  ADDRESS    GPU             REASON
mlx5_0  ib    shared  active  400 Gb/s  0     21:00.0  -       0 fe80::1  gpu0 gpu1 gpu2  no NIC is under a GPU's PCIe switch

GPU   MODEL  NUMA  PCI      NICS    DISTANCE  REASON
gpu0  -      0     1b:00.0  mlx5_0  numa      on NUMA node 0
gpu1  -      0     1c:00.0  mlx5_0  numa      on NUMA node 0
gpu2  -      1     9b:00.0  mlx5_0  far       across NUMA nodes 0 and 1
----
----

check
----
warn  gpu2  numa  its NIC mlx5_0 is across NUMA nodes 0 and 1
                  → move the card to a slot of the same PCIe switch or socket; until then expect less bandwidth

# Two NICs and two GPUs under one switch: not both on the first NIC.
host
gpu at=15/15:01.0/16:00.0/17:00.0/1b:00.0 numa=0
gpu at=15/15:01.0/16:00.0/17:01.0/1c:00.0 numa=0
rdma mlx5_0 at=15/15:01.0/16:00.0/17:02.0/1d:00.0 numa=0 gid=0,fe80::1
rdma mlx5_1 at=15/15:01.0/16:00.0/17:03.0/1e:00.0 numa=0 gid=0,fe80::2
----

list
----
----
NIC     KIND  ROLE    STATE   RATE      NUMA  PCI      NETDEV  ADDRESS    GPU   REASON
mlx5_0  ib    shared  active  400 Gb/s  0     1d:00.0  -       0 fe80::1  gpu0  under PCIe switch 16:00.0, as gpu0, gpu1; no other NIC reaches storage
mlx5_1  ib    shared  active  400 Gb/s  0     1e:00.0  -       0 fe80::2  gpu1  under PCIe switch 16:00.0, as gpu0, gpu1; no other NIC reaches storage

GPU   MODEL  NUMA  PCI      NICS    DISTANCE  REASON
gpu0  -      0     1b:00.0  mlx5_0  switch    under PCIe switch 16:00.0
gpu1  -      0     1c:00.0  mlx5_1  switch    under PCIe switch 16:00.0
----
----

# A bond of two ports, as RDMA device; its hash keeps a peer on one of them.
host
bond bond0 members=ens1f0,ens1f1 speed=200000 mtu=1500
net ens1f0 at=20/20:01.0/21:00.0 numa=0 model=15b3:101d driver=mlx5_core speed=100000
net ens1f1 at=20/20:01.0/21:00.1 numa=0 model=15b3:101d driver=mlx5_core speed=100000
rdma mlx5_bond_0 at=20/20:01.0/21:00.0 numa=0 model=15b3:101d layer=Ethernet rate="100 Gb/sec (4X EDR)" netdev=bond0 gid=1,fe80::5 gid2=3,::ffff:10.0.0.1,"RoCE v2" class=0x020000
module ib_uverbs
----

list
----
NIC          KIND  ROLE  STATE   RATE      NUMA  PCI      NETDEV  ADDRESS     GPU  REASON
mlx5_bond_0  roce  snic  active  100 Gb/s  0     21:00.0  bond0   3 10.0.0.1  -    no GPU on this host

check
----
warn  mlx5_bond_0  mtu   MTU of 1500: RoCE packets carry 1024 bytes instead of 4096
                         → ip link set dev bond0 mtu 9000, if the switches carry it
warn  mlx5_bond_0  bond  bond hashes by layer2: all traffic to one peer takes one of 2 members
                         → ip link set dev bond0 type bond xmit_hash_policy layer3+4

# A ConnectX without its RDMA module, TCP steps in.
host
net ens1f0 at=20/20:01.0/21:00.0 numa=0 model=15b3:101d driver=mlx5_core speed=100000
net eno1 at=00/00:1f.6 speed=1000
----

list
----
NIC     KIND  ROLE  STATE  RATE      NUMA  PCI      NETDEV  ADDRESS  GPU  REASON
eno1    tcp   none  up     1 Gb/s    -     00:1f.6  eno1    -        -    others are faster: 100 Gb/s
ens1f0  tcp   snic  up     100 Gb/s  0     21:00.0  ens1f0  -        -    no RDMA device; TCP

check
----
warn  host  module  21:00.0 (15b3:101d, driver mlx5_core) has no RDMA device
                    → modprobe mlx5_ib

# Software RDMA and virtual functions.
host
net eth0 at=00/00:03.0 speed=10000 mtu=1500
rdma rxe0 layer=Ethernet rate="10 Gb/sec (1X FDR10)" netdev=eth0 gid=0,fe80::cc30:d5ff:fe07:3c1f,"RoCE v2" gid2=1,::ffff:192.0.2.7,"RoCE v2"
module ib_uverbs
----

list
----
NIC   KIND  ROLE  STATE   RATE     NUMA  PCI      NETDEV  ADDRESS      GPU  REASON
rxe0  roce  snic  active  10 Gb/s  -     00:03.0  eth0    1 192.0.2.7  -    no GPU on this host

check
----
warn  rxe0  mtu  MTU of 1500: RoCE packets carry 1024 bytes instead of 4096
                 → ip link set dev eth0 mtu 9000, if the switches carry it

host
rdma mlx5_0 at=20/20:01.0/21:00.0 numa=0 vfs=2 gid=0,fe80::1
rdma mlx5_1 at=20/20:01.0/21:00.2 numa=0 vf-of=21:00.0 gid=0,fe80::2
rdma rxe0 layer=Ethernet netdev=eth0 gid=1,::ffff:192.0.2.7,"RoCE v2"
net eth0 at=00/00:03.0 speed=10000 mtu=1500
----

list
----
NIC     KIND  ROLE  STATE   RATE      NUMA  PCI      NETDEV  ADDRESS      GPU  REASON
mlx5_0  ib    snic  active  400 Gb/s  0     21:00.0  -       0 fe80::1    -    no GPU on this host
mlx5_1  ib    none  active  400 Gb/s  0     21:00.2  -       0 fe80::2    -    virtual function of 21:00.0, which is here itself
rxe0    roce  none  active  400 Gb/s  -     00:03.0  eth0    1 192.0.2.7  -    software RDMA, beside NICs that do it in hardware

# In a container: a virtual function alone, and an interface that is virtual.
host
rdma mlx5_1 at=20/20:01.0/21:00.2 numa=0 vf-of=21:00.0 gid=0,fe80::2
net eth0 speed=10000
----

list
----
----
NIC     KIND  ROLE  STATE   RATE      NUMA  PCI      NETDEV  ADDRESS    GPU  REASON
mlx5_1  ib    snic  active  400 Gb/s  0     21:00.2  -       0 fe80::2  -    no GPU on this host

not listed, virtual: eth0
----
----

host
net eth0 speed=10000
net tunl0 oper=down flags=0x80
----

addrs
eth0 10.42.0.7/24
----

list
----
----
NIC   KIND  ROLE  STATE  RATE     NUMA  PCI  NETDEV  ADDRESS    GPU  REASON
eth0  tcp   snic  up     10 Gb/s  -     -    eth0    10.42.0.7  -    no RDMA device; TCP

not listed, virtual: tunl0
----
----

# What configuration says goes first.
host dgx-h100.host
----

roles
mlx5_0 snic
mlx5_1 none
eno3 shared
----

list
----
----
NIC      KIND  ROLE    STATE   RATE      NUMA  PCI      NETDEV     ADDRESS                 GPU        REASON
mlx5_0   ib    snic    active  400 Gb/s  0     18:00.0  ibp24s0    0 fe80::a088:c203:1:18  -          configured
mlx5_1   roce  none    active  200 Gb/s  0     29:00.0  ens6f0np0  3 10.10.0.1             -          configured
mlx5_2   roce  snic    active  200 Gb/s  0     29:00.1  ens6f1np1  3 10.10.1.1             -          under no GPU's PCIe switch
mlx5_3   ib    cnic    active  400 Gb/s  0     40:00.0  ibp64s0    0 fe80::a088:c203:1:40  gpu1 gpu0  under PCIe switch 3e:00.0, as gpu1
mlx5_4   ib    cnic    active  400 Gb/s  0     4f:00.0  ibp79s0    0 fe80::a088:c203:1:4f  gpu2       under PCIe switch 4d:00.0, as gpu2
mlx5_5   ib    cnic    active  400 Gb/s  0     5e:00.0  ibp94s0    0 fe80::a088:c203:1:5e  gpu3       under PCIe switch 5c:00.0, as gpu3
mlx5_6   ib    cnic    active  400 Gb/s  1     9a:00.0  ibp154s0   0 fe80::a088:c203:1:9a  gpu4       under PCIe switch 98:00.0, as gpu4
mlx5_7   roce  snic    active  200 Gb/s  1     aa:00.0  ens1f0np0  3 10.10.2.1             -          under no GPU's PCIe switch
mlx5_8   roce  snic    active  200 Gb/s  1     aa:00.1  ens1f1np1  3 10.10.3.1             -          under no GPU's PCIe switch
mlx5_9   ib    cnic    active  400 Gb/s  1     c0:00.0  ibp192s0   0 fe80::a088:c203:1:c0  gpu5       under PCIe switch be:00.0, as gpu5
mlx5_10  ib    cnic    active  400 Gb/s  1     ce:00.0  ibp206s0   0 fe80::a088:c203:1:ce  gpu6       under PCIe switch cc:00.0, as gpu6
mlx5_11  ib    cnic    active  400 Gb/s  1     dc:00.0  ibp220s0   0 fe80::a088:c203:1:dc  gpu7       under PCIe switch da:00.0, as gpu7
eno3     tcp   shared  up      1 Gb/s    0     64:00.0  eno3       -                       -          configured

GPU   MODEL  NUMA  PCI      NICS     DISTANCE  REASON
gpu0  -      0     1b:00.0  mlx5_3   numa      on NUMA node 0
gpu1  -      0     43:00.0  mlx5_3   switch    under PCIe switch 3e:00.0
gpu2  -      0     52:00.0  mlx5_4   switch    under PCIe switch 4d:00.0
gpu3  -      0     61:00.0  mlx5_5   switch    under PCIe switch 5c:00.0
gpu4  -      1     9d:00.0  mlx5_6   switch    under PCIe switch 98:00.0
gpu5  -      1     c3:00.0  mlx5_9   switch    under PCIe switch be:00.0
gpu6  -      1     d1:00.0  mlx5_10  switch    under PCIe switch cc:00.0
gpu7  -      1     df:00.0  mlx5_11  switch    under PCIe switch da:00.0

not listed, virtual: docker0
----
----
