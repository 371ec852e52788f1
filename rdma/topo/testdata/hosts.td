host dgx-h100.host
----

list
----
----
NIC      KIND  ROLE  STATE   RATE      NUMA  PCI      NETDEV     ADDRESS                 GPU   REASON
mlx5_0   ib    cnic  active  400 Gb/s  0     18:00.0  ibp24s0    0 fe80::a088:c203:1:18  gpu0  under PCIe switch 16:00.0, as gpu0
mlx5_1   roce  snic  active  200 Gb/s  0     29:00.0  ens6f0np0  3 10.10.0.1             -     under no GPU's PCIe switch
mlx5_2   roce  snic  active  200 Gb/s  0     29:00.1  ens6f1np1  3 10.10.1.1             -     under no GPU's PCIe switch
mlx5_3   ib    cnic  active  400 Gb/s  0     40:00.0  ibp64s0    0 fe80::a088:c203:1:40  gpu1  under PCIe switch 3e:00.0, as gpu1
mlx5_4   ib    cnic  active  400 Gb/s  0     4f:00.0  ibp79s0    0 fe80::a088:c203:1:4f  gpu2  under PCIe switch 4d:00.0, as gpu2
mlx5_5   ib    cnic  active  400 Gb/s  0     5e:00.0  ibp94s0    0 fe80::a088:c203:1:5e  gpu3  under PCIe switch 5c:00.0, as gpu3
mlx5_6   ib    cnic  active  400 Gb/s  1     9a:00.0  ibp154s0   0 fe80::a088:c203:1:9a  gpu4  under PCIe switch 98:00.0, as gpu4
mlx5_7   roce  snic  active  200 Gb/s  1     aa:00.0  ens1f0np0  3 10.10.2.1             -     under no GPU's PCIe switch
mlx5_8   roce  snic  active  200 Gb/s  1     aa:00.1  ens1f1np1  3 10.10.3.1             -     under no GPU's PCIe switch
mlx5_9   ib    cnic  active  400 Gb/s  1     c0:00.0  ibp192s0   0 fe80::a088:c203:1:c0  gpu5  under PCIe switch be:00.0, as gpu5
mlx5_10  ib    cnic  active  400 Gb/s  1     ce:00.0  ibp206s0   0 fe80::a088:c203:1:ce  gpu6  under PCIe switch cc:00.0, as gpu6
mlx5_11  ib    cnic  active  400 Gb/s  1     dc:00.0  ibp220s0   0 fe80::a088:c203:1:dc  gpu7  under PCIe switch da:00.0, as gpu7
eno3     tcp   none  up      1 Gb/s    0     64:00.0  eno3       -                       -     RDMA reaches storage

GPU   MODEL  NUMA  PCI      NICS     DISTANCE  REASON
gpu0  -      0     1b:00.0  mlx5_0   switch    under PCIe switch 16:00.0
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

choose role=snic
----
mlx5_1 mlx5_2 mlx5_7 mlx5_8

choose gpu=gpu3 rdma
----
mlx5_5

check
----
nothing to complain of

host p5.host
----

list
----
----
NIC         KIND  ROLE  STATE   RATE      NUMA  PCI      NETDEV   ADDRESS       GPU   REASON
rdmap79s0   efa   cnic  active  100 Gb/s  0     4f:00.0  -        0 fe80::40:1  gpu0  under PCIe switch 4e:00.0, as gpu0
rdmap80s0   efa   cnic  active  100 Gb/s  0     50:00.0  -        0 fe80::40:2  gpu0  under PCIe switch 4e:00.0, as gpu0
rdmap81s0   efa   cnic  active  100 Gb/s  0     51:00.0  -        0 fe80::40:3  gpu0  under PCIe switch 4e:00.0, as gpu0
rdmap82s0   efa   cnic  active  100 Gb/s  0     52:00.0  -        0 fe80::40:4  gpu0  under PCIe switch 4e:00.0, as gpu0
rdmap96s0   efa   cnic  active  100 Gb/s  0     60:00.0  -        0 fe80::41:1  gpu1  under PCIe switch 5f:00.0, as gpu1
rdmap97s0   efa   cnic  active  100 Gb/s  0     61:00.0  -        0 fe80::41:2  gpu1  under PCIe switch 5f:00.0, as gpu1
rdmap98s0   efa   cnic  active  100 Gb/s  0     62:00.0  -        0 fe80::41:3  gpu1  under PCIe switch 5f:00.0, as gpu1
rdmap99s0   efa   cnic  active  100 Gb/s  0     63:00.0  -        0 fe80::41:4  gpu1  under PCIe switch 5f:00.0, as gpu1
rdmap113s0  efa   cnic  active  100 Gb/s  0     71:00.0  -        0 fe80::42:1  gpu2  under PCIe switch 70:00.0, as gpu2
rdmap114s0  efa   cnic  active  100 Gb/s  0     72:00.0  -        0 fe80::42:2  gpu2  under PCIe switch 70:00.0, as gpu2
rdmap115s0  efa   cnic  active  100 Gb/s  0     73:00.0  -        0 fe80::42:3  gpu2  under PCIe switch 70:00.0, as gpu2
rdmap116s0  efa   cnic  active  100 Gb/s  0     74:00.0  -        0 fe80::42:4  gpu2  under PCIe switch 70:00.0, as gpu2
rdmap130s0  efa   cnic  active  100 Gb/s  0     82:00.0  -        0 fe80::43:1  gpu3  under PCIe switch 81:00.0, as gpu3
rdmap131s0  efa   cnic  active  100 Gb/s  0     83:00.0  -        0 fe80::43:2  gpu3  under PCIe switch 81:00.0, as gpu3
rdmap132s0  efa   cnic  active  100 Gb/s  0     84:00.0  -        0 fe80::43:3  gpu3  under PCIe switch 81:00.0, as gpu3
rdmap133s0  efa   cnic  active  100 Gb/s  0     85:00.0  -        0 fe80::43:4  gpu3  under PCIe switch 81:00.0, as gpu3
rdmap147s0  efa   cnic  active  100 Gb/s  1     93:00.0  -        0 fe80::44:1  gpu4  under PCIe switch 92:00.0, as gpu4
rdmap148s0  efa   cnic  active  100 Gb/s  1     94:00.0  -        0 fe80::44:2  gpu4  under PCIe switch 92:00.0, as gpu4
rdmap149s0  efa   cnic  active  100 Gb/s  1     95:00.0  -        0 fe80::44:3  gpu4  under PCIe switch 92:00.0, as gpu4
rdmap150s0  efa   cnic  active  100 Gb/s  1     96:00.0  -        0 fe80::44:4  gpu4  under PCIe switch 92:00.0, as gpu4
rdmap164s0  efa   cnic  active  100 Gb/s  1     a4:00.0  -        0 fe80::45:1  gpu5  under PCIe switch a3:00.0, as gpu5
rdmap165s0  efa   cnic  active  100 Gb/s  1     a5:00.0  -        0 fe80::45:2  gpu5  under PCIe switch a3:00.0, as gpu5
rdmap166s0  efa   cnic  active  100 Gb/s  1     a6:00.0  -        0 fe80::45:3  gpu5  under PCIe switch a3:00.0, as gpu5
rdmap167s0  efa   cnic  active  100 Gb/s  1     a7:00.0  -        0 fe80::45:4  gpu5  under PCIe switch a3:00.0, as gpu5
rdmap181s0  efa   cnic  active  100 Gb/s  1     b5:00.0  -        0 fe80::46:1  gpu6  under PCIe switch b4:00.0, as gpu6
rdmap182s0  efa   cnic  active  100 Gb/s  1     b6:00.0  -        0 fe80::46:2  gpu6  under PCIe switch b4:00.0, as gpu6
rdmap183s0  efa   cnic  active  100 Gb/s  1     b7:00.0  -        0 fe80::46:3  gpu6  under PCIe switch b4:00.0, as gpu6
rdmap184s0  efa   cnic  active  100 Gb/s  1     b8:00.0  -        0 fe80::46:4  gpu6  under PCIe switch b4:00.0, as gpu6
rdmap198s0  efa   cnic  active  100 Gb/s  1     c6:00.0  -        0 fe80::47:1  gpu7  under PCIe switch c5:00.0, as gpu7
rdmap199s0  efa   cnic  active  100 Gb/s  1     c7:00.0  -        0 fe80::47:2  gpu7  under PCIe switch c5:00.0, as gpu7
rdmap200s0  efa   cnic  active  100 Gb/s  1     c8:00.0  -        0 fe80::47:3  gpu7  under PCIe switch c5:00.0, as gpu7
rdmap201s0  efa   cnic  active  100 Gb/s  1     c9:00.0  -        0 fe80::47:4  gpu7  under PCIe switch c5:00.0, as gpu7
enp71s0     tcp   snic  up      -         0     47:00.0  enp71s0  -             -     the RDMA NICs are the GPUs'; storage over TCP

GPU   MODEL  NUMA  PCI      NICS                                         DISTANCE  REASON
gpu0  -      0     53:00.0  rdmap79s0 rdmap80s0 rdmap81s0 rdmap82s0      switch    under PCIe switch 4e:00.0
gpu1  -      0     64:00.0  rdmap96s0 rdmap97s0 rdmap98s0 rdmap99s0      switch    under PCIe switch 5f:00.0
gpu2  -      0     75:00.0  rdmap113s0 rdmap114s0 rdmap115s0 rdmap116s0  switch    under PCIe switch 70:00.0
gpu3  -      0     86:00.0  rdmap130s0 rdmap131s0 rdmap132s0 rdmap133s0  switch    under PCIe switch 81:00.0
gpu4  -      1     97:00.0  rdmap147s0 rdmap148s0 rdmap149s0 rdmap150s0  switch    under PCIe switch 92:00.0
gpu5  -      1     a8:00.0  rdmap164s0 rdmap165s0 rdmap166s0 rdmap167s0  switch    under PCIe switch a3:00.0
gpu6  -      1     b9:00.0  rdmap181s0 rdmap182s0 rdmap183s0 rdmap184s0  switch    under PCIe switch b4:00.0
gpu7  -      1     ca:00.0  rdmap198s0 rdmap199s0 rdmap200s0 rdmap201s0  switch    under PCIe switch c5:00.0
----
----

choose gpu=gpu7
----
rdmap198s0 rdmap199s0 rdmap200s0 rdmap201s0

choose gpu=gpu7 kind=(efa,roce)
----
rdmap198s0 rdmap199s0 rdmap200s0 rdmap201s0

host plain.host
----

addrs
eno1 192.0.2.10/24
enp65s0f0 10.1.0.4/16 fe80::1/64
----

list
----
----
NIC        KIND  ROLE  STATE              RATE     NUMA  PCI      NETDEV     ADDRESS     GPU  REASON
eno1       tcp   none  up                 1 Gb/s   -     00:1f.6  eno1       192.0.2.10  -    others are faster: 25 Gb/s
enp65s0f0  tcp   snic  up                 25 Gb/s  0     41:00.0  enp65s0f0  10.1.0.4    -    no RDMA device; TCP
enp65s0f1  tcp   none  interface is down  -        0     41:00.1  enp65s0f1  -           -    interface is down

not listed, virtual: docker0
----
----

check
----
nothing to complain of

choose rdma
----
----
topo: no usable RDMA NIC; `penstock nic check` says what to do. This host has:
NIC        KIND  ROLE  STATE              RATE     NUMA  PCI      NETDEV     ADDRESS     GPU  REASON
eno1       tcp   none  up                 1 Gb/s   -     00:1f.6  eno1       192.0.2.10  -    others are faster: 25 Gb/s
enp65s0f0  tcp   snic  up                 25 Gb/s  0     41:00.0  enp65s0f0  10.1.0.4    -    no RDMA device; TCP
enp65s0f1  tcp   none  interface is down  -        0     41:00.1  enp65s0f1  -           -    interface is down

not listed, virtual: docker0
----
----

# A machine with nothing.
host
----

list
----
no NIC

check
----
fail  host  no-nic  no NIC can be used
                    → mend the findings below; in a container, pass the devices in (/dev/infiniband, the host's network)

choose
----
topo: no usable NIC; `penstock nic check` says what to do. This host has:
no NIC

# Soft-RoCE, as Linux shows it.
host rxe.host
----

list
----
NIC   KIND  ROLE  STATE   RATE     NUMA  PCI  NETDEV  ADDRESS      GPU  REASON
rxe0  roce  snic  active  10 Gb/s  -     -    p0a     1 10.88.0.1  -    no GPU on this host
rxe1  roce  snic  active  10 Gb/s  -     -    p0b     1 10.88.0.2  -    no GPU on this host
rxe2  roce  snic  active  10 Gb/s  -     -    p1a     1 10.88.1.1  -    no GPU on this host
rxe3  roce  snic  active  10 Gb/s  -     -    p1b     1 10.88.1.2  -    no GPU on this host

check
----
nothing to complain of

choose nic=(10.88.0.2,rxe2)
----
rxe1 rxe2

choose nic=10.88.9.9
----
topo: no NIC named 10.88.9.9; `penstock nic check` says what to do. This host has:
NIC   KIND  ROLE  STATE   RATE     NUMA  PCI  NETDEV  ADDRESS      GPU  REASON
rxe0  roce  snic  active  10 Gb/s  -     -    p0a     1 10.88.0.1  -    no GPU on this host
rxe1  roce  snic  active  10 Gb/s  -     -    p0b     1 10.88.0.2  -    no GPU on this host
rxe2  roce  snic  active  10 Gb/s  -     -    p1a     1 10.88.1.1  -    no GPU on this host
rxe3  roce  snic  active  10 Gb/s  -     -    p1b     1 10.88.1.2  -    no GPU on this host

choose nic=rxe0 kind=(ib,efa)
----
topo: no NIC of kind ib or efa named rxe0; `penstock nic check` says what to do. This host has:
NIC   KIND  ROLE  STATE   RATE     NUMA  PCI  NETDEV  ADDRESS      GPU  REASON
rxe0  roce  snic  active  10 Gb/s  -     -    p0a     1 10.88.0.1  -    no GPU on this host
rxe1  roce  snic  active  10 Gb/s  -     -    p0b     1 10.88.0.2  -    no GPU on this host
rxe2  roce  snic  active  10 Gb/s  -     -    p1a     1 10.88.1.1  -    no GPU on this host
rxe3  roce  snic  active  10 Gb/s  -     -    p1b     1 10.88.1.2  -    no GPU on this host

choose kind=(ib,efa) role=snic
----
topo: no usable NIC of kind ib or efa of role snic; `penstock nic check` says what to do. This host has:
NIC   KIND  ROLE  STATE   RATE     NUMA  PCI  NETDEV  ADDRESS      GPU  REASON
rxe0  roce  snic  active  10 Gb/s  -     -    p0a     1 10.88.0.1  -    no GPU on this host
rxe1  roce  snic  active  10 Gb/s  -     -    p0b     1 10.88.0.2  -    no GPU on this host
rxe2  roce  snic  active  10 Gb/s  -     -    p1a     1 10.88.1.1  -    no GPU on this host
rxe3  roce  snic  active  10 Gb/s  -     -    p1b     1 10.88.1.2  -    no GPU on this host
