# Everything is lent. Three requests may wait; a fourth gets an error at once.

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

# x gives up: the requests after it are served now.

cancel
x
----
x: cancelled
y: page 0
z: page 10
y@0+10 z@10+10 .@20+236 b@256+256 waiting=0

# A request that does not fit waits also if no other request waits.

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
