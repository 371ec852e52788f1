new namespaces
----

frame many
----

screen 60 10
----
|penstock top  12:00:00, every 2s, 1 node|
|hit -  reads -/s, -/s  writes -/s, -/s  evictions -/s  0 B o|
| nodes [namespaces] nics  volumes  by read-bytes, largest fi|
|NAMESPACE  EPOCH  CHANGED     HIT  USED  QUOTA  READ B/s    |
|ns-00          1        -  93.8 %   0 B   none   100 MiB|
|ns-01          1        -  93.8 %   0 B   none    99 MiB|
|ns-02          1        -  93.8 %   0 B   none    98 MiB|
|ns-03          1        -  93.8 %   0 B   none    97 MiB|
|ns-04          1        -  93.8 %   0 B   none    96 MiB|
|rows 1 to 5 of 30  q quit  n s i v views  < > sort  r revers|

press pgdn down
----

screen 60 10
----
|penstock top  12:00:00, every 2s, 1 node|
|hit -  reads -/s, -/s  writes -/s, -/s  evictions -/s  0 B o|
| nodes [namespaces] nics  volumes  by read-bytes, largest fi|
|NAMESPACE  EPOCH  CHANGED     HIT  USED  QUOTA  READ B/s    |
|ns-06          1        -  93.8 %   0 B   none    94 MiB|
|ns-07          1        -  93.8 %   0 B   none    93 MiB|
|ns-08          1        -  93.8 %   0 B   none    92 MiB|
|ns-09          1        -  93.8 %   0 B   none    91 MiB|
|ns-10          1        -  93.8 %   0 B   none    90 MiB|
|rows 7 to 11 of 30  q quit  n s i v views  < > sort  r rever|

press end
----

screen 60 10
----
|penstock top  12:00:00, every 2s, 1 node|
|hit -  reads -/s, -/s  writes -/s, -/s  evictions -/s  0 B o|
| nodes [namespaces] nics  volumes  by read-bytes, largest fi|
|NAMESPACE  EPOCH  CHANGED     HIT  USED  QUOTA  READ B/s    |
|ns-25          1        -  93.8 %   0 B   none    75 MiB|
|ns-26          1        -  93.8 %   0 B   none    74 MiB|
|ns-27          1        -  93.8 %   0 B   none    73 MiB|
|ns-28          1        -  93.8 %   0 B   none    72 MiB|
|ns-29          1        -  93.8 %   0 B   none    71 MiB|
|rows 26 to 30 of 30  q quit  n s i v views  < > sort  r reve|

# A larger screen is filled.
screen 60 30
----
|penstock top  12:00:00, every 2s, 1 node|
|hit -  reads -/s, -/s  writes -/s, -/s  evictions -/s  0 B o|
| nodes [namespaces] nics  volumes  by read-bytes, largest fi|
|NAMESPACE  EPOCH  CHANGED     HIT  USED  QUOTA  READ B/s    |
|ns-05          1        -  93.8 %   0 B   none    95 MiB|
|ns-06          1        -  93.8 %   0 B   none    94 MiB|
|ns-07          1        -  93.8 %   0 B   none    93 MiB|
|ns-08          1        -  93.8 %   0 B   none    92 MiB|
|ns-09          1        -  93.8 %   0 B   none    91 MiB|
|ns-10          1        -  93.8 %   0 B   none    90 MiB|
|ns-11          1        -  93.8 %   0 B   none    89 MiB|
|ns-12          1        -  93.8 %   0 B   none    88 MiB|
|ns-13          1        -  93.8 %   0 B   none    87 MiB|
|ns-14          1        -  93.8 %   0 B   none    86 MiB|
|ns-15          1        -  93.8 %   0 B   none    85 MiB|
|ns-16          1        -  93.8 %   0 B   none    84 MiB|
|ns-17          1        -  93.8 %   0 B   none    83 MiB|
|ns-18          1        -  93.8 %   0 B   none    82 MiB|
|ns-19          1        -  93.8 %   0 B   none    81 MiB|
|ns-20          1        -  93.8 %   0 B   none    80 MiB|
|ns-21          1        -  93.8 %   0 B   none    79 MiB|
|ns-22          1        -  93.8 %   0 B   none    78 MiB|
|ns-23          1        -  93.8 %   0 B   none    77 MiB|
|ns-24          1        -  93.8 %   0 B   none    76 MiB|
|ns-25          1        -  93.8 %   0 B   none    75 MiB|
|ns-26          1        -  93.8 %   0 B   none    74 MiB|
|ns-27          1        -  93.8 %   0 B   none    73 MiB|
|ns-28          1        -  93.8 %   0 B   none    72 MiB|
|ns-29          1        -  93.8 %   0 B   none    71 MiB|
|rows 6 to 30 of 30  q quit  n s i v views  < > sort  r rever|

press home up r
----

screen 60 10
----
|penstock top  12:00:00, every 2s, 1 node|
|hit -  reads -/s, -/s  writes -/s, -/s  evictions -/s  0 B o|
| nodes [namespaces] nics  volumes  by read-bytes, smallest f|
|NAMESPACE  EPOCH  CHANGED     HIT  USED  QUOTA  READ B/s    |
|ns-29          1        -  93.8 %   0 B   none    71 MiB|
|ns-28          1        -  93.8 %   0 B   none    72 MiB|
|ns-27          1        -  93.8 %   0 B   none    73 MiB|
|ns-26          1        -  93.8 %   0 B   none    74 MiB|
|ns-25          1        -  93.8 %   0 B   none    75 MiB|
|rows 1 to 5 of 30  q quit  n s i v views  < > sort  r revers|

new namespaces namespace reverse limit=3
----

frame many
----

screen 60 10
----
|penstock top  12:00:00, every 2s, 1 node|
|hit -  reads -/s, -/s  writes -/s, -/s  evictions -/s  0 B o|
| nodes [namespaces] nics  volumes  by namespace, Z first  7 |
|NAMESPACE  EPOCH  CHANGED     HIT  USED  QUOTA  READS/s     |
|ns-29          1        -  93.8 %   0 B   none       71|
|ns-28          1        -  93.8 %   0 B   none       72|
|ns-27          1        -  93.8 %   0 B   none       73|
||
||
|q quit  n s i v views  < > sort  r reverse  space pause  h h|
