frame busy
----

table nodes
----
NODE         STATE                 FILL  READS/s  READ B/s  WRITES/s  WRITE B/s     HIT  EVICT/s  BUSY/s       QUEUE  VOLUMES                    TOKENS/s     USED     UP  REASON
node-a       serving             50.0 %    12.3k    12 GiB      1234    1.1 GiB  93.8 %      617       0    0+12/256  2 ok                           790k  1.0 TiB  1d 1h
node-b       read_only           99.1 %       12    12 MiB       1.2    1.1 MiB  93.8 %      0.6     3.2  256+12/256  1 ok, 1 failed, 2 suspect       768  1.0 TiB  1d 1h  /data/1: failed (EIO)
node-c       serving, restarted       -        -         -         -          -       -        -       -           -  1 ok                              -      0 B     1s
node-d:7420  no answer: connection refused

table nodes reads reverse
----
NODE         STATE                 FILL  READS/s  READ B/s  WRITES/s  WRITE B/s     HIT  EVICT/s  BUSY/s       QUEUE  VOLUMES                    TOKENS/s     USED     UP  REASON
node-b       read_only           99.1 %       12    12 MiB       1.2    1.1 MiB  93.8 %      0.6     3.2  256+12/256  1 ok, 1 failed, 2 suspect       768  1.0 TiB  1d 1h  /data/1: failed (EIO)
node-a       serving             50.0 %    12.3k    12 GiB      1234    1.1 GiB  93.8 %      617       0    0+12/256  2 ok                           790k  1.0 TiB  1d 1h
node-c       serving, restarted       -        -         -         -          -       -        -       -           -  1 ok                              -      0 B     1s
node-d:7420  no answer: connection refused

table namespaces old limit=2
----
NAMESPACE  EPOCH  CHANGED     HIT     USED               QUOTA  READS/s  READ B/s  WRITES/s  WRITE B/s  EVICT/s      OLD  LIVE  TOKENS/s  LEASES  NODES
chat/70b    7..8   3h ago  93.8 %  900 GiB   88.0 % of 1.0 TiB      12k    12 GiB      1200    1.1 GiB      600  100 GiB     2      768k      12      3
rollout       31   5s ago       -  100 GiB  100.0 % of 100 GiB        -         -         -          -        -   99 GiB     1         -       0      2

table nics
----
NODE         NIC     STATE  SENT B/s    SENT  RECEIVED B/s  RECEIVED      LINK  ADDRESS        REASON
node-a       mlx5_0  up       22 GiB  96.0 %       954 MiB     4.0 %  200 Gb/s  10.0.0.1:7421
node-a       mlx5_1  down        0 B       -           0 B         -         -  10.0.1.1:7421  has no carrier
node-d:7420  no answer: connection refused

table volumes failures
----
NODE         VOLUME   STATE     FILL  READ B/s  WRITE B/s  FAILURES/s        IN FLIGHT     USED  CAPACITY  REASON
node-b       /data/1  failed       -       0 B        0 B           2          0 B/0 B      0 B       0 B  EIO
node-a       /data/0  ok      50.0 %   2.8 GiB     95 MiB           0  4.0 MiB/8.0 MiB  512 GiB   1.0 TiB
node-d:7420  no answer: connection refused

frame silent
----

table nics
----
NODE         NIC  STATE  SENT B/s  SENT  RECEIVED B/s  RECEIVED  LINK  ADDRESS  REASON
node-d:7420  no answer: connection refused
