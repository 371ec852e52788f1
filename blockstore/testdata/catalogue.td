# The catalogue is replaced as a whole on every volume. The newest one is used.

volume a b
----
ok

open a b segment=65536
----
ok

catalogue
----
""

catalogue set=one
----
ok

catalogue set=two
----
ok

catalogue
----
"two"

close
----
ok

# If the catalogue area of one volume is damaged, the other volume's is used.

flip file=catalogue of=a byte=4096
----
ok

open a b
----
ok

catalogue
----
"two"

close
----
ok

# If the areas of both volumes are damaged, the catalogue before is used.

flip file=catalogue of=b byte=4096
----
ok

open a b
----
ok

catalogue
----
"one"

catalogue set=three
----
ok

crash seed=9
----
ok

open a b
----
ok

catalogue
----
"three"

catalogue size=4097
----
blockstore: catalogue of 4097 bytes; the volumes have room for 4096: too large for the volumes

inspect a
----
volume a
copy A: superblock version 1 sequence 4
  node       6ae6783f4fbde91b6eb88b73a48ed247
  volume     dbe5882e2579683432c1bfc525454add, 0 of 2
  boot       3
  segment    65536 bytes
  catalogue  4096 bytes
copy B: superblock version 1 sequence 5
  node       6ae6783f4fbde91b6eb88b73a48ed247
  volume     dbe5882e2579683432c1bfc525454add, 0 of 2
  boot       4
  segment    65536 bytes
  catalogue  4096 bytes
area A: catalogue sequence 2, 5 bytes, checksum c11df15eb3a3e385
area B: catalogue sequence 1, 3 bytes, checksum 911faba7321fe1a0
