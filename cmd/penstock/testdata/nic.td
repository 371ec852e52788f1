# NICs of hosts that this test does not run on.

sysfs dgx dgx-h100
----

sysfs plain plain
----

run
nic list --sysfs @dgx
nic check --sysfs @dgx
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
nothing to complain of

13 of 13 NICs can be used
----
----

# What was saved is the same host.
run
nic list --sysfs @plain
nic list --sysfs @plain --save @saved
nic list --sysfs @saved
nic list --sysfs @plain --save @saved
----
----
NIC        KIND  ROLE  STATE              RATE     NUMA  PCI      NETDEV     ADDRESS  GPU  REASON
eno1       tcp   none  up                 1 Gb/s   -     00:1f.6  eno1       -        -    others are faster: 25 Gb/s
enp65s0f0  tcp   snic  up                 25 Gb/s  0     41:00.0  enp65s0f0  -        -    no RDMA device; TCP
enp65s0f1  tcp   none  interface is down  -        0     41:00.1  enp65s0f1  -        -    interface is down

not listed, virtual: docker0
NIC        KIND  ROLE  STATE              RATE     NUMA  PCI      NETDEV     ADDRESS  GPU  REASON
eno1       tcp   none  up                 1 Gb/s   -     00:1f.6  eno1       -        -    others are faster: 25 Gb/s
enp65s0f0  tcp   snic  up                 25 Gb/s  0     41:00.0  enp65s0f0  -        -    no RDMA device; TCP
enp65s0f1  tcp   none  interface is down  -        0     41:00.1  enp65s0f1  -        -    interface is down

not listed, virtual: docker0
NIC        KIND  ROLE  STATE              RATE     NUMA  PCI      NETDEV     ADDRESS  GPU  REASON
eno1       tcp   none  up                 1 Gb/s   -     00:1f.6  eno1       -        -    others are faster: 25 Gb/s
enp65s0f0  tcp   snic  up                 25 Gb/s  0     41:00.0  enp65s0f0  -        -    no RDMA device; TCP
enp65s0f1  tcp   none  interface is down  -        0     41:00.1  enp65s0f1  -        -    interface is down

not listed, virtual: docker0
penstock: --save: topo: save: DIR/saved is not empty
exit 1
----
----

sysfs broken dgx-h100
file class/infiniband/mlx5_4/ports/1/state "1: DOWN"
file class/infiniband/mlx5_4/ports/1/phys_state "3: Disabled"
file class/infiniband/mlx5_9/ports/1/rate "200 Gb/sec (2X NDR)"
----

run
nic check --sysfs @broken
nic check --sysfs @broken --format json
----
----
fail  mlx5_4  port-down  port is down (Disabled)
                         → the port is switched off: rdma link, or ibportstate enable
fail  mlx5_9  rate       200 Gb/s instead of 400, as mlx5_0, the same model, does
                         → look at the cable and the switch's port (mlxlink -d 0000:c0:00.0 shows what was negotiated, and errors)
warn  gpu2    gpu-nic    its own NIC mlx5_4 is not usable; mlx5_0 stands in, on NUMA node 0
                         → mend mlx5_4

12 of 13 NICs can be used
exit 1
{
  "healthy": false,
  "nics": 13,
  "usable": 12,
  "findings": [
    {
      "severity": "fail",
      "nic": "mlx5_4",
      "code": "port-down",
      "what": "port is down (Disabled)",
      "do": "the port is switched off: rdma link, or ibportstate enable"
    },
    {
      "severity": "fail",
      "nic": "mlx5_9",
      "code": "rate",
      "what": "200 Gb/s instead of 400, as mlx5_0, the same model, does",
      "do": "look at the cable and the switch's port (mlxlink -d 0000:c0:00.0 shows what was negotiated, and errors)"
    },
    {
      "severity": "warn",
      "nic": "gpu2",
      "code": "gpu-nic",
      "what": "its own NIC mlx5_4 is not usable; mlx5_0 stands in, on NUMA node 0",
      "do": "mend mlx5_4"
    }
  ]
}
exit 1
----
----

run
nic list --sysfs @plain
nic check --sysfs @plain
nic list --sysfs @plain --role eno1=shared
nic list --sysfs @plain --role eno1=shared --format json
----
----
NIC        KIND  ROLE  STATE              RATE     NUMA  PCI      NETDEV     ADDRESS  GPU  REASON
eno1       tcp   none  up                 1 Gb/s   -     00:1f.6  eno1       -        -    others are faster: 25 Gb/s
enp65s0f0  tcp   snic  up                 25 Gb/s  0     41:00.0  enp65s0f0  -        -    no RDMA device; TCP
enp65s0f1  tcp   none  interface is down  -        0     41:00.1  enp65s0f1  -        -    interface is down

not listed, virtual: docker0
nothing to complain of

2 of 3 NICs can be used
NIC        KIND  ROLE    STATE              RATE     NUMA  PCI      NETDEV     ADDRESS  GPU  REASON
eno1       tcp   shared  up                 1 Gb/s   -     00:1f.6  eno1       -        -    configured
enp65s0f0  tcp   snic    up                 25 Gb/s  0     41:00.0  enp65s0f0  -        -    no RDMA device; TCP
enp65s0f1  tcp   none    interface is down  -        0     41:00.1  enp65s0f1  -        -    interface is down

not listed, virtual: docker0
{
  "nics": [
    {
      "name": "eno1",
      "kind": "tcp",
      "role": "shared",
      "reason": "configured",
      "usable": true,
      "pci": {
        "address": "0000:00:1f.6",
        "path": [
          "pci0000:00",
          "0000:00:1f.6"
        ],
        "id": "8086:1592",
        "driver": "ice",
        "numa": -1,
        "link": {
          "gts": 32,
          "lanes": 16
        },
        "link_max": {
          "gts": 32,
          "lanes": 16
        }
      },
      "state": "up",
      "rate_gbps": 1,
      "netdev": "eno1",
      "netdev_up": true,
      "mtu_bytes": 1500
    },
    {
      "name": "enp65s0f0",
      "kind": "tcp",
      "role": "snic",
      "reason": "no RDMA device; TCP",
      "usable": true,
      "pci": {
        "address": "0000:41:00.0",
        "path": [
          "pci0000:40",
          "0000:40:01.0",
          "0000:41:00.0"
        ],
        "id": "8086:1592",
        "driver": "ice",
        "numa": 0,
        "link": {
          "gts": 32,
          "lanes": 16
        },
        "link_max": {
          "gts": 32,
          "lanes": 16
        }
      },
      "state": "up",
      "rate_gbps": 25,
      "netdev": "enp65s0f0",
      "netdev_up": true,
      "mtu_bytes": 9000
    },
    {
      "name": "enp65s0f1",
      "kind": "tcp",
      "role": "none",
      "reason": "interface is down",
      "usable": false,
      "problem": "interface is down",
      "pci": {
        "address": "0000:41:00.1",
        "path": [
          "pci0000:40",
          "0000:40:01.0",
          "0000:41:00.1"
        ],
        "id": "8086:1592",
        "driver": "ice",
        "numa": 0,
        "link": {
          "gts": 32,
          "lanes": 16
        },
        "link_max": {
          "gts": 32,
          "lanes": 16
        }
      },
      "state": "down",
      "rate_gbps": 0,
      "netdev": "enp65s0f1",
      "netdev_up": true,
      "mtu_bytes": 9000
    }
  ],
  "gpus": [],
  "skipped": [
    "docker0"
  ]
}
----
----

sysfs nothing plain
gone class/net
----

run
nic list --sysfs @nothing
nic check --sysfs @nothing
----
----
no NIC
fail  host  no-nic  no NIC can be used
                    → mend the findings below; in a container, pass the devices in (/dev/infiniband, the host's network)

0 of 0 NICs can be used
exit 1
----
----

run
nic check --sysfs @dgx --rate 800
nic list --sysfs @missing
nic list --role eno1
nic list --role eno1=fast
nic drain
----
----
fail  mlx5_0   rate  400 Gb/s instead of 800, as expected
                     → look at the cable and the switch's port (mlxlink -d 0000:18:00.0 shows what was negotiated, and errors)
fail  mlx5_1   rate  200 Gb/s instead of 800, as expected
                     → look at the cable and the switch's port (mlxlink -d 0000:29:00.0 shows what was negotiated, and errors)
fail  mlx5_2   rate  200 Gb/s instead of 800, as expected
                     → look at the cable and the switch's port (mlxlink -d 0000:29:00.1 shows what was negotiated, and errors)
fail  mlx5_3   rate  400 Gb/s instead of 800, as expected
                     → look at the cable and the switch's port (mlxlink -d 0000:40:00.0 shows what was negotiated, and errors)
fail  mlx5_4   rate  400 Gb/s instead of 800, as expected
                     → look at the cable and the switch's port (mlxlink -d 0000:4f:00.0 shows what was negotiated, and errors)
fail  mlx5_5   rate  400 Gb/s instead of 800, as expected
                     → look at the cable and the switch's port (mlxlink -d 0000:5e:00.0 shows what was negotiated, and errors)
fail  mlx5_6   rate  400 Gb/s instead of 800, as expected
                     → look at the cable and the switch's port (mlxlink -d 0000:9a:00.0 shows what was negotiated, and errors)
fail  mlx5_7   rate  200 Gb/s instead of 800, as expected
                     → look at the cable and the switch's port (mlxlink -d 0000:aa:00.0 shows what was negotiated, and errors)
fail  mlx5_8   rate  200 Gb/s instead of 800, as expected
                     → look at the cable and the switch's port (mlxlink -d 0000:aa:00.1 shows what was negotiated, and errors)
fail  mlx5_9   rate  400 Gb/s instead of 800, as expected
                     → look at the cable and the switch's port (mlxlink -d 0000:c0:00.0 shows what was negotiated, and errors)
fail  mlx5_10  rate  400 Gb/s instead of 800, as expected
                     → look at the cable and the switch's port (mlxlink -d 0000:ce:00.0 shows what was negotiated, and errors)
fail  mlx5_11  rate  400 Gb/s instead of 800, as expected
                     → look at the cable and the switch's port (mlxlink -d 0000:dc:00.0 shows what was negotiated, and errors)

13 of 13 NICs can be used
exit 1
penstock: --sysfs DIR/missing: stat DIR/missing: no such file or directory
exit 1
penstock: --role eno1: write NIC=ROLE
Run 'penstock nic list --help' for usage.
exit 2
penstock: --role eno1=fast: topo: "fast" is no role of a NIC; roles are cnic, snic, shared and none
Run 'penstock nic list --help' for usage.
exit 2
penstock: unknown command "drain" for "penstock nic"
Run 'penstock nic --help' for usage.
exit 2
----
----

text opensm.conf
qos TRUE
qos_max_vls 4
qos_high_limit 100
qos_vlarb_high 0:192,1:192,2:0,3:192
qos_vlarb_low 0:192,1:192,2:64,3:192
qos_swe_vlarb_high 0:192,1:192,2:192,3:192
----

text words
no such thing
----

text port
tc-bw 0:1 1:1 3:98
tc-tsa all:ets
prio-tc 1:1 3:3
prio-pfc 1:on 3:on
dscp-prio 8:1 26:3
----

run
nic check --sysfs @plain --qos @opensm.conf
nic check --sysfs @plain --qos - --format json < port
nic check --sysfs @plain --qos @missing
nic check --sysfs @plain --qos - < words
nic check --sysfs @plain --qos-map bulk=sl:1
----
----
nothing to complain of

InfiniBand: collectives are guaranteed 50.0 % beside cache traffic
fail  qos  swe: kv's VL 2 is in the high table, beside collective
            → qos_swe_vlarb_high with 2:0

2 of 3 NICs can be used
exit 1
{
  "healthy": true,
  "nics": 3,
  "usable": 2,
  "findings": [],
  "qos": {
    "fabric": "RoCE",
    "high_share": 0.98989898989899,
    "deviations": []
  }
}
penstock: --qos: open DIR/missing: no such file or directory
exit 1
penstock: --qos -: qos: neither an OpenSM file (qos_vlarb_high …) nor what dcb prints (dcb ets show, dcb pfc show, dcb app show)
exit 1
penstock: --qos-map: qos: "bulk" is no class; write kv=… or collective=…
Run 'penstock nic check --help' for usage.
exit 2
----
----
