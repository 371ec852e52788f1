frame busy
----

press s
----

screen 180 12
----
|penstock top  12:00:00, every 2s, 4 nodes, 1 without an answer|
|hit 93.8 %  reads 12.4k/s, 12 GiB/s  writes 1235/s, 1.2 GiB/s  evictions 618/s  2.0 TiB of 4.0 TiB used|
| nodes [namespaces] nics  volumes  by read-bytes, largest first|
|NAMESPACE    EPOCH  CHANGED     HIT     USED               QUOTA  READS/s  READ B/s  WRITES/s  WRITE B/s  EVICT/s      OLD  LIVE  TOKENS/s  LEASES  NODES                           |
|chat/70b      7..8   3h ago  93.8 %  900 GiB   88.0 % of 1.0 TiB      12k    12 GiB      1200    1.1 GiB      600  100 GiB     2      768k      12      3|
|code             1        -  93.8 %  1.0 GiB                none        0       0 B         0        0 B        0      0 B     1         0       0      1|
|rollout         31   5s ago       -  100 GiB  100.0 % of 100 GiB        -         -         -          -        -   99 GiB     1         -       0      2|
|node-d:7420  no answer: connection refused|
||
||
||
|q quit  n s i v views  < > sort  r reverse  space pause  h help|

press i
----

screen 160 10
----
|penstock top  12:00:00, every 2s, 4 nodes, 1 without an answer|
|hit 93.8 %  reads 12.4k/s, 12 GiB/s  writes 1235/s, 1.2 GiB/s  evictions 618/s  2.0 TiB of 4.0 TiB used|
| nodes  namespaces [nics] volumes  by node, A first|
|NODE         NIC     STATE  SENT B/s    SENT  RECEIVED B/s  RECEIVED      LINK  ADDRESS        REASON                                                           |
|node-a       mlx5_0  up       22 GiB  96.0 %       954 MiB     4.0 %  200 Gb/s  10.0.0.1:7421                |
|node-a       mlx5_1  down        0 B       -           0 B         -         -  10.0.1.1:7421  has no carrier|
|node-d:7420  no answer: connection refused|
||
||
|q quit  n s i v views  < > sort  r reverse  space pause  h help|

press v
----

styles 160 10
----
|<bold penstock top>  12:00:00, every 2s, 4 nodes, <bad <bold 1 without an answer>>|
|hit 93.8 %  reads 12.4k/s, 12 GiB/s  writes 1235/s, 1.2 GiB/s  evictions 618/s  2.0 TiB of 4.0 TiB used|
| nodes  namespaces  nics <bold [volumes]> by node, A first|
|<reverse NODE         VOLUME   STATE     FILL  READ B/s  WRITE B/s  FAILURES/s        IN FLIGHT     USED  CAPACITY  REASON                                               >|
|node-a       /data/0  ok      50.0 %   2.8 GiB     95 MiB           0  4.0 MiB/8.0 MiB  512 GiB   1.0 TiB        |
|node-b       /data/1  <bad failed>       -       0 B        0 B  <bad          2>          0 B/0 B      0 B       0 B  EIO   |
|<bad node-d:7420>  <bad no answer: connection refused>|
||
||
|q quit  n s i v views  < > sort  r reverse  space pause  h help|

press tab tab
----

# The order of each view is its own.
press right right right right
----

screen 100 12
----
|penstock top  12:00:00, every 2s, 4 nodes, 1 without an answer|
|hit 93.8 %  reads 12.4k/s, 12 GiB/s  writes 1235/s, 1.2 GiB/s  evictions 618/s  2.0 TiB of 4.0 TiB u|
| nodes [namespaces] nics  volumes  by old, largest first  9 of 16 columns|
|NAMESPACE    EPOCH  CHANGED     HIT     USED               QUOTA  READS/s  READ B/s      OLD        |
|chat/70b      7..8   3h ago  93.8 %  900 GiB   88.0 % of 1.0 TiB      12k    12 GiB  100 GiB|
|rollout         31   5s ago       -  100 GiB  100.0 % of 100 GiB        -         -   99 GiB|
|code             1        -  93.8 %  1.0 GiB                none        0       0 B      0 B|
|node-d:7420  no answer: connection refused|
||
||
||
|q quit  n s i v views  < > sort  r reverse  space pause  h help|

press n s
----

screen 100 12
----
|penstock top  12:00:00, every 2s, 4 nodes, 1 without an answer|
|hit 93.8 %  reads 12.4k/s, 12 GiB/s  writes 1235/s, 1.2 GiB/s  evictions 618/s  2.0 TiB of 4.0 TiB u|
| nodes [namespaces] nics  volumes  by old, largest first  9 of 16 columns|
|NAMESPACE    EPOCH  CHANGED     HIT     USED               QUOTA  READS/s  READ B/s      OLD        |
|chat/70b      7..8   3h ago  93.8 %  900 GiB   88.0 % of 1.0 TiB      12k    12 GiB  100 GiB|
|rollout         31   5s ago       -  100 GiB  100.0 % of 100 GiB        -         -   99 GiB|
|code             1        -  93.8 %  1.0 GiB                none        0       0 B      0 B|
|node-d:7420  no answer: connection refused|
||
||
||
|q quit  n s i v views  < > sort  r reverse  space pause  h help|

frame unlisted
----

screen 80 8
----
|penstock top  12:00:00, every 2s, 1 node|
|hit -  reads -/s, -/s  writes -/s, -/s  evictions -/s  0 B of 0 B used|
| nodes [namespaces] nics  volumes  by old, largest first  10 of 16 columns|
|NAMESPACE  EPOCH  CHANGED  HIT  USED  QUOTA  READS/s  READ B/s  WRITES/s  OLD   |
|node-a     namespaces unknown: permission denied|
||
||
|q quit  n s i v views  < > sort  r reverse  space pause  h help|

frame evil
----

press n
----

screen 200 8
----
|penstock top  12:00:00, every 2s, 1 node|
|hit -  reads -/s, -/s  writes -/s, -/s  evictions -/s  0 B of 0 B used|
|[nodes] namespaces  nics  volumes  by node, A first|
|NODE       STATE      FILL  READS/s  READ B/s  WRITES/s  WRITE B/s     HIT  EVICT/s  BUSY/s     QUEUE  VOLUMES  TOKENS/s     USED     UP  REASON                                                        |
|evil?[2J?  serving  50.0 %        1   1.0 MiB       0.1     98 KiB  93.8 %      0.1       0  0+12/256  2 ok           64  1.0 TiB  1d 1h  ?gnp.exe???31m|
||
||
|q quit  n s i v views  < > sort  r reverse  space pause  h help|
