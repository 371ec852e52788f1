# The quota of a tenant: the cap of all namespaces whose names begin with a prefix. It is in the roles.

text team.token
0123456789abcdef-team
----

text sre.token
0123456789abcdef-sre
----

text roles.yaml
principals:
  - name: team-a
    tokens: [sha256:06f876924838134b84c7c7eda48773d02eeba83170ed40844ccc34a1fa73ff40]
    grants:
      - {roles: [read, write, admin], namespaces: [team-a/*]}
  - name: sre
    tokens: [sha256:2f6fb979354d28a61f6f784492745058818fedf3d9fc19096e171b976b617407]
    grants:
      - {roles: [operate, admin, read, write], namespaces: ["*"]}
tenants:
  - {namespaces: team-a/*, quota: 256KiB}
----

start --auth-roles-file @roles.yaml
----
ready

tokens one 1 32
----

tokens two 2 32
----

tokens three 3 32
----

data block 7 131072
----

# A block of these namespaces takes 20 KiB on storage, with its header. So 12 blocks fit the quota. A tenant cannot evade it by
# further namespaces: the second and the third write evict blocks of the tenant. A quota of a namespace does not help.

run
ns create team-a/x --layers 4 --block-tokens 4 --token-bytes 1024 --no-salt --token-file @team.token
ns create team-a/y --layers 4 --block-tokens 4 --token-bytes 1024 --no-salt --token-file @team.token
ns create other --layers 4 --block-tokens 4 --token-bytes 1024 --token-file @sre.token
ns quota team-a/y 1TiB --token-file @team.token
block put other --tokens-file @one --data-file @block --token-file @sre.token
block put team-a/x --tokens-file @one --data-file @block --token-file @team.token
block put team-a/y --tokens-file @two --data-file @block --token-file @team.token
block put team-a/y --tokens-file @three --data-file @block --token-file @team.token
ns list --token-file @sre.token
ns tenants --token-file @team.token
ns tenants --token-file @team.token --format json
----
name         team-a/x
id           1
index        trie
geometry     4 tokens × [full 4×1024 B]
block        16 KiB
epoch        1
epoch since  TIME
quota        none
used         0 B
blocks       0
leases       0
name         team-a/y
id           2
index        trie
geometry     4 tokens × [full 4×1024 B]
block        16 KiB
epoch        1
epoch since  TIME
quota        none
used         0 B
blocks       0
leases       0
name         other
id           3
index        trie
geometry     4 tokens × [full 4×1024 B]
block        16 KiB
epoch        1
epoch since  TIME
quota        none
used         0 B
blocks       0
leases       0
name         team-a/y
id           2
index        trie
geometry     4 tokens × [full 4×1024 B]
block        16 KiB
epoch        1
epoch since  TIME
quota        1.0 TiB
used         0 B
blocks       0
leases       0
stored 8 blocks (128 KiB), 0 were there already, last block 8847fbc48cae05930c4249b061f65fc1
stored 8 blocks (128 KiB), 0 were there already, last block f38e2a1618b25bf8e1e96cad218ca638
stored 8 blocks (128 KiB), 0 were there already, last block 8bdc25211a6aaad977645cbabd738593
stored 8 blocks (128 KiB), 0 were there already, last block bf9f1ddef9b3f42b3aa306f911066b4b
NAME      TENANT  INDEX  EPOCH  BLOCKS  USED     QUOTA    BLOCK   GEOMETRY
other             trie   1      8       160 KiB  none     16 KiB  4 tokens × [full 4×1024 B]
team-a/x          trie   1      0       0 B      none     16 KiB  4 tokens × [full 4×1024 B]
team-a/y          trie   1      12      240 KiB  1.0 TiB  16 KiB  4 tokens × [full 4×1024 B]
TENANT    NAMESPACES  USED     QUOTA    EVICTED  REFUSED BLOCKS
team-a/*  2           240 KiB  256 KiB  240 KiB  0
{
  "tenants": [
    {
      "evicted_blocks": 12,
      "evicted_bytes": 245760,
      "namespace_count": 2,
      "namespaces": "team-a/*",
      "quota_bytes": 262144,
      "refused_blocks": 0,
      "used_bytes": 245760
    }
  ]
}

# No block of a namespace fits.

run
ns create team-a/large --layers 8 --block-tokens 16 --token-bytes 4096 --no-salt --token-file @team.token
----
penstock: bad request: tenant team-a/*: a quota of 262144 bytes is too small for one block of namespace "team-a/large", which takes 528384 on storage
exit 1

# The file is used only if the quota of each tenant is valid and not below one block.

text roles.yaml
principals:
  - name: team-a
    tokens: [sha256:06f876924838134b84c7c7eda48773d02eeba83170ed40844ccc34a1fa73ff40]
    grants:
      - {roles: [read, write, admin], namespaces: [team-a/*]}
  - name: sre
    tokens: [sha256:2f6fb979354d28a61f6f784492745058818fedf3d9fc19096e171b976b617407]
    grants:
      - {roles: [operate, admin, read, write], namespaces: ["*"]}
tenants:
  - {namespaces: team-a/*, quota: 1KiB}
----

run
config reload --token-file @sre.token
----
penstock: nothing was applied: config: auth.roles_file: DIR/roles.yaml: bad request: tenant team-a/*: a quota of 1024 bytes is too small for one block of namespace "team-a/x", which takes 20480 on storage
exit 1

text roles.yaml
principals:
  - name: team-a
    tokens: [sha256:06f876924838134b84c7c7eda48773d02eeba83170ed40844ccc34a1fa73ff40]
    grants:
      - {roles: [read, write, admin], namespaces: [team-a/*]}
  - name: sre
    tokens: [sha256:2f6fb979354d28a61f6f784492745058818fedf3d9fc19096e171b976b617407]
    grants:
      - {roles: [operate, admin, read, write], namespaces: ["*"]}
tenants:
  - {namespaces: team-a/*, quota: 1TiB}
  - {namespaces: team-a/x/*, quota: 1GiB}
----

run
config reload --token-file @sre.token
----
penstock: nothing was applied: config: auth.roles_file: roles file DIR/roles.yaml:12: tenants.1.namespaces: team-a/x/* overlaps with the tenant team-a/*, so a namespace could count towards two quotas; give each namespace one tenant
exit 1

text roles.yaml
principals:
  - name: team-a
    tokens: [sha256:06f876924838134b84c7c7eda48773d02eeba83170ed40844ccc34a1fa73ff40]
    grants:
      - {roles: [read, write, admin], namespaces: [team-a/*]}
  - name: sre
    tokens: [sha256:2f6fb979354d28a61f6f784492745058818fedf3d9fc19096e171b976b617407]
    grants:
      - {roles: [operate, admin, read, write], namespaces: ["*"]}
tenants:
  - {namespaces: team-a/x, quota: 1GiB}
----

run
config reload --token-file @sre.token
----
penstock: nothing was applied: config: auth.roles_file: roles file DIR/roles.yaml:11: tenants.0.namespaces: "team-a/x" is one namespace; set its quota with penstock ns quota, or write a prefix such as team-a/*
exit 1

text roles.yaml
principals:
  - name: team-a
    tokens: [sha256:06f876924838134b84c7c7eda48773d02eeba83170ed40844ccc34a1fa73ff40]
    grants:
      - {roles: [read, write, admin], namespaces: [team-a/*]}
  - name: sre
    tokens: [sha256:2f6fb979354d28a61f6f784492745058818fedf3d9fc19096e171b976b617407]
    grants:
      - {roles: [operate, admin, read, write], namespaces: ["*"]}
tenants:
  - {namespaces: "*", quota: 1GiB}
----

run
config reload --token-file @sre.token
----
penstock: nothing was applied: config: auth.roles_file: roles file DIR/roles.yaml:11: tenants.0.namespaces: a quota on "*" would be one on the whole node; set the capacity of the node instead
exit 1

text roles.yaml
principals:
  - name: team-a
    tokens: [sha256:06f876924838134b84c7c7eda48773d02eeba83170ed40844ccc34a1fa73ff40]
    grants:
      - {roles: [read, write, admin], namespaces: [team-a/*]}
  - name: sre
    tokens: [sha256:2f6fb979354d28a61f6f784492745058818fedf3d9fc19096e171b976b617407]
    grants:
      - {roles: [operate, admin, read, write], namespaces: ["*"]}
tenants:
  - {namespaces: team-a/*}
----

run
config reload --token-file @sre.token
----
penstock: nothing was applied: config: auth.roles_file: roles file DIR/roles.yaml:11: tenants.0.quota: tenant team-a/* has no quota; write it like 2TiB, or remove the tenant
exit 1

text roles.yaml
principals:
  - name: team-a
    tokens: [sha256:06f876924838134b84c7c7eda48773d02eeba83170ed40844ccc34a1fa73ff40]
    grants:
      - {roles: [read, write, admin], namespaces: [team-a/*]}
  - name: sre
    tokens: [sha256:2f6fb979354d28a61f6f784492745058818fedf3d9fc19096e171b976b617407]
    grants:
      - {roles: [operate, admin, read, write], namespaces: ["*"]}
tenants:
  - {namespaces: team-a/*, quota: lots}
----

run
config reload --token-file @sre.token
----
penstock: nothing was applied: config: auth.roles_file: roles file DIR/roles.yaml:11: tenants.0.quota: "lots" is not a number of bytes; write it like 2TiB or 500GB, or remove the tenant if there is no quota
exit 1

# A lower quota is in force with the next write, which evicts the excess. A write above the whole quota is stored in part.

text roles.yaml
principals:
  - name: team-a
    tokens: [sha256:06f876924838134b84c7c7eda48773d02eeba83170ed40844ccc34a1fa73ff40]
    grants:
      - {roles: [read, write, admin], namespaces: [team-a/*]}
  - name: sre
    tokens: [sha256:2f6fb979354d28a61f6f784492745058818fedf3d9fc19096e171b976b617407]
    grants:
      - {roles: [operate, admin, read, write], namespaces: ["*"]}
tenants:
  - {namespaces: team-a/*, quota: 130KiB}
----

succeed
config reload --token-file @sre.token
----

run
ns list --token-file @sre.token
block put team-a/x --tokens-file @one --data-file @block --token-file @team.token
ns list --token-file @sre.token
ns tenants --token-file @sre.token
----
NAME      TENANT  INDEX  EPOCH  BLOCKS  USED     QUOTA    BLOCK   GEOMETRY
other             trie   1      8       160 KiB  none     16 KiB  4 tokens × [full 4×1024 B]
team-a/x          trie   1      0       0 B      none     16 KiB  4 tokens × [full 4×1024 B]
team-a/y          trie   1      12      240 KiB  1.0 TiB  16 KiB  4 tokens × [full 4×1024 B]
penstock: block 6 (b5ef030cd16f928967980246d94f9f9b) was refused: over_quota (the quota of the namespace or of its tenant is used up; penstock ns show, penstock ns tenants)
exit 1
NAME      TENANT  INDEX  EPOCH  BLOCKS  USED     QUOTA    BLOCK   GEOMETRY
other             trie   1      8       160 KiB  none     16 KiB  4 tokens × [full 4×1024 B]
team-a/x          trie   1      6       120 KiB  none     16 KiB  4 tokens × [full 4×1024 B]
team-a/y          trie   1      0       0 B      1.0 TiB  16 KiB  4 tokens × [full 4×1024 B]
TENANT    NAMESPACES  USED     QUOTA    EVICTED  REFUSED BLOCKS
team-a/*  2           120 KiB  130 KiB  480 KiB  2

# Without the tenant there is no quota.

text roles.yaml
principals:
  - name: team-a
    tokens: [sha256:06f876924838134b84c7c7eda48773d02eeba83170ed40844ccc34a1fa73ff40]
    grants:
      - {roles: [read, write, admin], namespaces: [team-a/*]}
  - name: sre
    tokens: [sha256:2f6fb979354d28a61f6f784492745058818fedf3d9fc19096e171b976b617407]
    grants:
      - {roles: [operate, admin, read, write], namespaces: ["*"]}
----

succeed
config reload --token-file @sre.token
----

run
block put team-a/x --tokens-file @two --data-file @block --token-file @team.token
ns list --token-file @sre.token
ns tenants --token-file @team.token
----
stored 8 blocks (128 KiB), 0 were there already, last block c2eaab4677bee0f908094fc8210f289b
NAME      TENANT  INDEX  EPOCH  BLOCKS  USED     QUOTA    BLOCK   GEOMETRY
other             trie   1      8       160 KiB  none     16 KiB  4 tokens × [full 4×1024 B]
team-a/x          trie   1      14      280 KiB  none     16 KiB  4 tokens × [full 4×1024 B]
team-a/y          trie   1      0       0 B      1.0 TiB  16 KiB  4 tokens × [full 4×1024 B]
no tenant with a quota on all of whose namespaces the caller has a role

# A document is checked without a node. The check does not know the sizes of blocks.

text roles.yaml
principals:
  - name: team-a
    tokens: [sha256:06f876924838134b84c7c7eda48773d02eeba83170ed40844ccc34a1fa73ff40]
    grants:
      - {roles: [read, write, admin], namespaces: [team-a/*]}
  - name: sre
    tokens: [sha256:2f6fb979354d28a61f6f784492745058818fedf3d9fc19096e171b976b617407]
    grants:
      - {roles: [operate, admin, read, write], namespaces: ["*"]}
tenants:
  - {namespaces: team-a/*, quota: 1TiB}
  - {namespaces: team-a/x/*, quota: 1GiB}
----

run
cluster roles check @roles.yaml
----
penstock: DIR/roles.yaml:12: tenants.1.namespaces: team-a/x/* overlaps with the tenant team-a/*, so a namespace could count towards two quotas; give each namespace one tenant
exit 1

stop
----
exit 0
