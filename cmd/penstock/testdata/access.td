# Roles: team-a works in its namespaces, sre operates the node. The file has the SHA-256 of the tokens.

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
      - {roles: [operate, admin], namespaces: ["*"]}
----

start --auth-roles-file @roles.yaml
----
ready

run
ns create team-a/m --layers 4 --block-tokens 4 --token-bytes 1024 --no-salt --token-file @team.token
ns create m --layers 4 --block-tokens 4 --token-bytes 1024 --token-file @sre.token
ns create team-b/m --layers 4 --block-tokens 4 --token-bytes 1024 --token-file @team.token
ns list --token-file @team.token
ns list --token-file @sre.token
ns show m --token-file @team.token
status --token-file @team.token
evict --bytes 1MiB --dry-run --token-file @team.token
config diff --token-file @team.token
config diff --token-file @sre.token
status
----
name         team-a/m
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
name         m
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
penstock: principal "team-a" lacks the role admin on namespace "team-b/m"; an administrator grants it in auth.roles_file or auth.roles_etcd of the node
exit 1
NAME      TENANT  INDEX  EPOCH  BLOCKS  USED  QUOTA  BLOCK   GEOMETRY
team-a/m          trie   1      0       0 B   none   16 KiB  4 tokens × [full 4×1024 B]
NAME      TENANT  INDEX  EPOCH  BLOCKS  USED  QUOTA  BLOCK   GEOMETRY
m                 trie   1      0       0 B   none   16 KiB  4 tokens × [full 4×1024 B]
team-a/m          trie   1      0       0 B   none   16 KiB  4 tokens × [full 4×1024 B]
penstock: principal "team-a" has no role on namespace "m"; an administrator grants it in auth.roles_file or auth.roles_etcd of the node
exit 1
penstock: principal "team-a" lacks the role operate; an administrator grants it in auth.roles_file or auth.roles_etcd of the node
exit 1
penstock: principal "team-a" lacks the role operate; an administrator grants it in auth.roles_file or auth.roles_etcd of the node
exit 1
penstock: principal "team-a" lacks the role operate; an administrator grants it in auth.roles_file or auth.roles_etcd of the node
exit 1
the node runs with its flags and environment
penstock: this node requires a bearer token or a certificate of a principal of its auth.roles_file or auth.roles_etcd; give the client its token file (--token-file)
exit 1

tokens prompt 1 32
----

data block 7 131072
----

run
block put team-a/m --tokens-file @prompt --data-file @block --token-file @team.token
prefix match team-a/m --tokens-file @prompt --token-file @team.token
prefix match team-a/m --tokens-file @prompt --token-file @sre.token
----
stored 8 blocks (128 KiB), 0 were there already, last block c1e45fc06aa9f25954879365670d0439
matched  32 of 32 tokens, 8 of 8 blocks, 128 KiB
cut      complete
epoch    1
penstock: principal "sre" lacks the role read on any namespace; an administrator grants it in auth.roles_file or auth.roles_etcd of the node
exit 1

stop
----
exit 0

# A node has a roles file or a token file.

start --auth-roles-file @roles.yaml --auth-token-file @new.token
----
penstock: config: auth.roles_file: is set together with auth.token_file, whose tokens may do everything; list the SHA-256 of these tokens in the roles file, and leave auth.token_file empty: bad configuration
Run 'penstock serve --help' for usage.
exit 2
