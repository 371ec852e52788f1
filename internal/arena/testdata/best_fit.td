# The region has 512 pages of 4 KiB. Requests are "name pages"; the picture shows name@first+count,
# with a dot for free pages.

alloc
a 10
b 20
c 30
d 40
----
a: page 0
b: page 10
c: page 30
d: page 60
a@0+10 b@10+20 c@30+30 d@60+40 .@100+412 waiting=0

# Two free runs: 10 pages at 0 and 30 at 30.

release
a
c
----
.@0+10 b@10+20 .@30+30 d@60+40 .@100+412 waiting=0

# Ten pages fill the first run exactly; nine more are taken from the shorter of the remaining runs.

alloc
e 9
f 25
g 1
----
e: page 0
f: page 30
g: page 9
e@0+9 g@9+1 b@10+20 f@30+25 .@55+5 d@60+40 .@100+412 waiting=0

# Releasing b joins the free runs on both sides.

release
b
f
e
----
.@0+9 g@9+1 .@10+50 d@60+40 .@100+412 waiting=0
