# Everything is lent; three may wait, a fourth is told so at once.

alloc
a 256
b 256
x 300
y 10
z 10
w 1
----
a: page 0
b: page 256
w: busy
a@0+256 b@256+256 waiting=3

# Half is free, and y and z would fit, but x came first.

release
a
----
.@0+256 b@256+256 waiting=3

# x gives up: those behind it are served now.

cancel
x
----
x: cancelled
y: page 0
z: page 10
y@0+10 z@10+10 .@20+236 b@256+256 waiting=0

# A request that waits behind nobody and does not fit waits too.

alloc
v 300
----
y@0+10 z@10+10 .@20+236 b@256+256 waiting=1

release
b
y
----
v: page 20
.@0+10 z@10+10 v@20+300 .@320+192 waiting=0
