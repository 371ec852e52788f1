# Before the first answers.
screen 60 6
----
|penstock top|
||
|[nodes] namespaces  nics  volumes  by node, A first  7 of 16|
|NODE  STATE  FILL  READS/s  READ B/s  WRITES/s  WRITE B/s   |
|waiting for the first answers|
|q quit  n s i v views  < > sort  r reverse  space pause  h h|

frame busy
----

screen 200 12
----
|penstock top  12:00:00, every 2s, 4 nodes, 1 without an answer|
|hit 93.8 %  reads 12.4k/s, 12 GiB/s  writes 1235/s, 1.2 GiB/s  evictions 618/s  2.0 TiB of 4.0 TiB used|
|[nodes] namespaces  nics  volumes  by node, A first|
|NODE         STATE                 FILL  READS/s  READ B/s  WRITES/s  WRITE B/s     HIT  EVICT/s  BUSY/s       QUEUE  VOLUMES                    TOKENS/s     USED     UP  REASON                       |
|node-a       serving             50.0 %    12.3k    12 GiB      1234    1.1 GiB  93.8 %      617       0    0+12/256  2 ok                           790k  1.0 TiB  1d 1h                       |
|node-b       read_only           99.1 %       12    12 MiB       1.2    1.1 MiB  93.8 %      0.6     3.2  256+12/256  1 ok, 1 failed, 2 suspect       768  1.0 TiB  1d 1h  /data/1: failed (EIO)|
|node-c       serving, restarted       -        -         -         -          -       -        -       -           -  1 ok                              -      0 B     1s                       |
|node-d:7420  no answer: connection refused|
||
||
||
|q quit  n s i v views  < > sort  r reverse  space pause  h help|

styles 200 12
----
|<bold penstock top>  12:00:00, every 2s, 4 nodes, <bad <bold 1 without an answer>>|
|hit 93.8 %  reads 12.4k/s, 12 GiB/s  writes 1235/s, 1.2 GiB/s  evictions 618/s  2.0 TiB of 4.0 TiB used|
|<bold [nodes]> namespaces  nics  volumes  by node, A first|
|<reverse NODE         STATE                 FILL  READS/s  READ B/s  WRITES/s  WRITE B/s     HIT  EVICT/s  BUSY/s       QUEUE  VOLUMES                    TOKENS/s     USED     UP  REASON                       >|
|node-a       serving             50.0 %    12.3k    12 GiB      1234    1.1 GiB  93.8 %      617       0    0+12/256  2 ok                           790k  1.0 TiB  1d 1h                       |
|node-b       <warn read_only         >  <warn 99.1 %>       12    12 MiB       1.2    1.1 MiB  93.8 %      0.6  <warn    3.2>  <warn 256+12/256>  <bad 1 ok, 1 failed, 2 suspect>       768  1.0 TiB  1d 1h  /data/1: failed (EIO)|
|node-c       <warn serving, restarted>       -        -         -         -          -       -        -       -           -  1 ok                              -      0 B     1s                       |
|<bad node-d:7420>  <bad no answer: connection refused>|
||
||
||
|q quit  n s i v views  < > sort  r reverse  space pause  h help|

# A narrow terminal has fewer columns; the sort column stays.
screen 60 12
----
|penstock top  12:00:00, every 2s, 4 nodes, 1 without an answ|
|hit 93.8 %  reads 12.4k/s, 12 GiB/s  writes 1235/s, 1.2 GiB/|
|[nodes] namespaces  nics  volumes  by node, A first  5 of 16|
|NODE         STATE                 FILL  READS/s  READ B/s  |
|node-a       serving             50.0 %    12.3k    12 GiB|
|node-b       read_only           99.1 %       12    12 MiB|
|node-c       serving, restarted       -        -         -|
|node-d:7420  no answer: connection refused|
||
||
||
|q quit  n s i v views  < > sort  r reverse  space pause  h h|

press > > > > > > > >
----

screen 60 12
----
|penstock top  12:00:00, every 2s, 4 nodes, 1 without an answ|
|hit 93.8 %  reads 12.4k/s, 12 GiB/s  writes 1235/s, 1.2 GiB/|
|[nodes] namespaces  nics  volumes  by evictions, largest fir|
|NODE         STATE                 FILL  READS/s  EVICT/s   |
|node-a       serving             50.0 %    12.3k      617|
|node-b       read_only           99.1 %       12      0.6|
|node-c       serving, restarted       -        -        -|
|node-d:7420  no answer: connection refused|
||
||
||
|q quit  n s i v views  < > sort  r reverse  space pause  h h|

press r
----

screen 60 9
----
|penstock top  12:00:00, every 2s, 4 nodes, 1 without an answ|
|hit 93.8 %  reads 12.4k/s, 12 GiB/s  writes 1235/s, 1.2 GiB/|
|[nodes] namespaces  nics  volumes  by evictions, smallest fi|
|NODE         STATE                 FILL  READS/s  EVICT/s   |
|node-b       read_only           99.1 %       12      0.6|
|node-a       serving             50.0 %    12.3k      617|
|node-c       serving, restarted       -        -        -|
|node-d:7420  no answer: connection refused|
|q quit  n s i v views  < > sort  r reverse  space pause  h h|

# A very small one.
screen 12 3
----
|penstock top|
|hit 93.8 %  |
|[nodes] name|

press h
----

screen 80 24
----
|penstock top: keys and columns (any key closes this help)|
|q            quit|
|n            nodes|
|s            namespaces|
|i            NICs of the data plane|
|v            volumes|
|Tab          the next view|
|< >, ← →     another sort column|
|r            reverse the order|
|↑ ↓          scroll, also with PgUp, PgDn, Home and End|
|space        pause, and continue|
|h or ?       this help|
||
|Rates are per second, over the time since the sample before. "-" is unknown:|
|there is no earlier sample, or the node has started again since.|
|HIT      tokens found by Match calls, of the tokens that they requested|
|BUSY/s   calls that were refused because a limit was reached|
|QUEUE    reads that wait + reads that run / the most that may run|
|OLD      bytes of blocks of older epochs, until they are freed|
|CHANGED  the time since the epoch began; unknown if no node has run since|
|SENT, RECEIVED  the part of the link's rate that is used|

press x
----

press space
----

screen 80 8
----
|penstock top  12:00:00, every 2s, 4 nodes, 1 without an answer  PAUSED|
|hit 93.8 %  reads 12.4k/s, 12 GiB/s  writes 1235/s, 1.2 GiB/s  evictions 618/s  |
|[nodes] namespaces  nics  volumes  by evictions, smallest first  7 of 16 columns|
|NODE         STATE                 FILL  READS/s  READ B/s  WRITES/s  EVICT/s   |
|node-b       read_only           99.1 %       12    12 MiB       1.2      0.6|
|node-a       serving             50.0 %    12.3k    12 GiB      1234      617|
|node-c       serving, restarted       -        -         -         -        -|
|rows 1 to 3 of 4  q quit  n s i v views  < > sort  r reverse  space pause  h hel|

press q
----
q quits

frame silent
----

screen 80 8
----
|penstock top  12:00:00, every 2s, 1 node, 1 without an answer  PAUSED|
||
|[nodes] namespaces  nics  volumes  by evictions, smallest first  9 of 16 columns|
|NODE         STATE  FILL  READS/s  READ B/s  WRITES/s  WRITE B/s  HIT  EVICT/s  |
|node-d:7420  no answer: connection refused|
||
||
|q quit  n s i v views  < > sort  r reverse  space pause  h help|
