check
opensm_has_no_such_line
----
qos: neither an OpenSM file (qos_vlarb_high …) nor what dcb prints (dcb ets show, dcb pfc show, dcb app show)

# A fabric without QoS.
check
qos FALSE
qos_max_vls 15
qos_high_limit 0
qos_vlarb_high (null)
----
InfiniBand, collectives are guaranteed 0.0 %
QoS is off: OpenSM sets no tables
  → qos TRUE
collective's VL 0 is not in the high table
  → qos_vlarb_high with 0:192
kv's VL 2 has no weight anywhere: it starves
  → qos_vlarb_low with 2:64

# OpenSM's tables as it ships them: low lanes are weighed, one packet high.
check
qos TRUE
qos_max_vls 15
qos_high_limit 0
qos_vlarb_high 0:4,1:0,2:0,3:0
qos_vlarb_low 0:0,1:4,2:4,3:4
qos_sl2vl 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,7
----
InfiniBand, collectives are guaranteed 50.0 %
collectives are guaranteed only 50.0 %, beside kv
  → qos_high_limit 240

# One lane: SL 2 is cut to VL 0.
check
qos TRUE
qos_max_vls 1
qos_high_limit 240
qos_vlarb_high 0:192
qos_vlarb_low 0:192
----
InfiniBand, collectives are guaranteed 50.0 %
kv (SL 2) and collective (SL 0) are both on VL 0
  → qos_max_vls of 4 or more, and qos_sl2vl

# The cache starves: no weight, or no turns.
check
qos TRUE
qos_max_vls 4
qos_high_limit 255
qos_vlarb_high 0:192,1:192,2:0,3:192
qos_vlarb_low 0:192,1:192,2:0,3:192
----
InfiniBand, collectives are guaranteed 100.0 %
kv's VL 2 has no weight anywhere: it starves
  → qos_vlarb_low with 2:64
a high limit of 255 switches the low table off: kv starves while collectives run
  → qos_high_limit 240

# The external ports of the switches are set otherwise.
check
qos TRUE
qos_max_vls 4
qos_high_limit 240
qos_vlarb_high 0:192,1:192,2:0,3:192
qos_vlarb_low 0:192,1:192,2:64,3:192
qos_swe_vlarb_high 0:192,2:192
qos_rtr_high_limit 10
----
InfiniBand, collectives are guaranteed 50.0 %
rtr: collectives are guaranteed only 90.9 %, beside kv
  → qos_rtr_high_limit 240
swe: kv's VL 2 is in the high table, beside collective
  → qos_swe_vlarb_high with 2:0

check
qos TRUE
qos_max_vls 2
qos_high_limit 240
qos_vlarb_high 0:192,3:192
qos_vlarb_low 1:64
qos_sl2vl 0,1,1,1
----
InfiniBand, collectives are guaranteed 99.6 %
VL 3 has a weight, and only 2 lanes exist
  → qos_max_vls

check collective=sl:5
qos TRUE
qos_max_vls 4
qos_high_limit 240
qos_vlarb_high 0:192
qos_vlarb_low 2:64
----
InfiniBand, collectives are guaranteed 0.0 %
collective's VL 1 is not in the high table
  → qos_vlarb_high with 1:192

check
qos_max_vls 4
qos_vlarb_high 0:192,1:x
----
qos: line 2: vlarb_high: weight "x" is not a number from 0 to 255

check
qos_max_vls 16
----
qos: line 1: max_vls: "16" is not a number from 1 to 15

check
qos_vlarb_low 15:1
----
qos: line 1: vlarb_low: VL "15" is not a number from 0 to 14

# What roce.sh --apply leaves behind, as dcb prints it with names.
check
willing off ets-cap 8 cbs off
tc-bw 0:1 1:1 2:0 3:98 4:0 5:0 6:0 7:0
pg-bw 0:0 1:0 2:0 3:0 4:0 5:0 6:0 7:0
tc-tsa 0:ets 1:ets 2:ets 3:ets 4:ets 5:ets 6:ets 7:ets
prio-tc 0:0 1:1 2:0 3:3 4:0 5:0 6:0 7:0
reco-tc-bw 0:0 1:0 2:0 3:0 4:0 5:0 6:0 7:0
pfc-cap 8 macsec-bypass off delay 0
prio-pfc 0:off 1:on 2:off 3:on 4:off 5:off 6:off 7:off
dscp-prio CS1:1 26:3
----
RoCE, collectives are guaranteed 99.0 %

# A NIC out of the box.
check
willing off ets-cap 8 cbs off
tc-bw 0:0 1:0 2:0 3:0 4:0 5:0 6:0 7:0
tc-tsa 0:vendor 1:vendor 2:vendor 3:vendor 4:vendor 5:vendor 6:vendor 7:vendor
prio-tc 0:1 1:0 2:2 3:3 4:4 5:5 6:6 7:7
prio-pfc 0:off 1:off 2:off 3:off 4:off 5:off 6:off 7:off
----
RoCE, collectives are guaranteed 50.0 %
DSCP 8 of kv has no priority: the port does not tell it apart
  → dcb app add dev DEV dscp-prio 8:1
priority 0 of kv is not lossless: PFC is off
  → dcb pfc set dev DEV prio-pfc 0:on
DSCP 26 of collective has no priority: the port does not tell it apart
  → dcb app add dev DEV dscp-prio 26:3
priority 0 of collective is not lossless: PFC is off
  → dcb pfc set dev DEV prio-pfc 0:on
kv and collective share traffic class 1
  → dcb ets set dev DEV prio-tc

# The usual RoCE guide: one lossless priority, halves.
check
tc-bw 0:50 3:50
tc-tsa all:ets
prio-tc 0:0 1:0 2:0 3:3 4:0 5:0 6:0 7:0
prio-pfc 3:on
dscp-prio 26:3
----
RoCE, collectives are guaranteed 50.0 %
DSCP 8 of kv has no priority: the port does not tell it apart
  → dcb app add dev DEV dscp-prio 8:1
priority 0 of kv is not lossless: PFC is off
  → dcb pfc set dev DEV prio-pfc 0:on
collectives are guaranteed only 50.0 %, beside kv
  → dcb ets set dev DEV tc-bw

# Strict priority for collectives, nothing kept for the cache.
check
tc-bw 1:100
tc-tsa 1:ets 3:strict
prio-tc 1:1 3:3
prio-pfc 1:on 3:on
dscp-prio 8:1 26:4
----
RoCE, collectives are guaranteed 0.0 %
DSCP 26 of collective has priority 4, not 3
  → dcb app replace dev DEV dscp-prio 26:3
priority 4 of collective is not lossless: PFC is off
  → dcb pfc set dev DEV prio-pfc 4:on
collectives are guaranteed only 0.0 %, beside kv
  → dcb ets set dev DEV tc-bw

check
tc-bw 0:101
----
qos: line 1: tc-bw 0:101: "101" is not a number from 0 to 100

check
prio-pfc 3:maybe
----
qos: line 1: prio-pfc 3:maybe: "maybe" is neither on nor off
