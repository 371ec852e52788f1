# Each target is close to one go line; what a line needs is said beside it.

# The only place where the tag of the io_uring backend, the link flag that its
# binding needs, and the tags of what asks the GPU driver are written down
# (docs/deps.md says why).
GOFLAGS_URING := -tags=uring,nvml,cuda -ldflags=-checklinkname=0
# The same for tests, with the checks of internal/invariants.
comma := ,
GOFLAGS_CHECKED := $(subst -tags=uring,-tags=uring$(comma)invariants,$(GOFLAGS_URING))

# Packages that the race detector tests, with io_uring and the invariants.
RACE := ./internal/arena/... ./io/... ./trie/... ./blockstore/... ./rdma/... ./server/... ./client/...
# Packages that are tested with io_uring and the invariants, but without the race detector: io_uring itself, and users of RACE.
CHECKED := ./io/uring ./blockstore ./internal/runs ./lab/testnode ./lab/bench/... ./lab/cluster ./lab/crash ./lab/emulate ./lab/profile ./lab/replay
# The program. None of its tests needs the plain build, so make test runs them once, with io_uring and the invariants; .ci/weekly runs them in the
# plain build. lab/crash and lab/rounds start the program of the plain build.
PROGRAM := ./cmd/penstock
# Packages of test-plain that take longest, whose tests mostly wait. They start first, so that no processor is idle at the end.
LONGEST := ./server/membership ./internal/lint ./client ./client/leader
# The tests of the program wait for most of their time, one after the other. Two processes run them: one the tests that match, the other all others.
HALF := ^Test[A-I]
FUZZTIME ?= 10s
BENCHTIME ?= 1s
# What test-rdma measures, and how long its guest may live. All rows: RDMA_BENCH=. RDMA_TIMEOUT=30m
RDMA_BENCH ?= ToPost|AgainstIBWriteBW/(single|paged)/(1MiB|1KiB)$$
RDMA_TIMEOUT ?= 8m
# The rows of bench-verbs: all but the cost of a call, thousands of writes of which take hours on emulated CPUs (BenchmarkToPost has it).
RDMA_ROWS ?= ^single|^[0-9]+ pages
# Builds against the headers and libraries that rdmalab downloaded; this machine needs none of them installed.
WITH_VERBS = lab=$$(bin/rdmalab -packages) && export CGO_CFLAGS="-g -O2 -I$$lab/usr/include" \
	CGO_LDFLAGS="-g -O2 -L$$lab/usr/lib/x86_64-linux-gnu -Wl,-rpath-link=$$lab/usr/lib/x86_64-linux-gnu" &&
# How many power cuts test-disks replays, and how long its guest may live.
POWER_CUTS ?= 210
DISKS_TIMEOUT ?= 40m
# Tests of io/uring that the guest leaves out: it has no go command, by which the first links a program. On the second file
# system also those of the bounds on what is in flight, which no file system has a part in and which take minutes on emulated CPUs.
NO_GO = TestDefectLinkname
NO_BOUNDS = $(NO_GO)|TestConformance/(few|small)
# The output directory of lib.
LIB ?= bin
# The outputs of static, image and deb.
STATIC = bin/static/penstock
IMAGE = bin/image
DEB = bin
# The version of a build without git's history: make build VERSION=1.2.3. In a build with the history the go command stamps tag and commit.
VERSION =
STAMP = $(if $(VERSION),-X=main.release=$(VERSION))
REF ?= main
PREFIX ?= /usr/local

.PHONY: build lib wheel test-python test-engines demo demo-node test test-plain test-checked memory-budget test-rdma test-disks test-gluster bench-verbs race fuzz bench bench-compare reproduce reproduce-quick lint ci proto install clean print-goflags-uring

build: ## bin/penstock, with io_uring
	go build $(GOFLAGS_URING) $(if $(VERSION),-ldflags='-checklinkname=0 $(STAMP)') -o bin/penstock ./cmd/penstock

# No path of the building machine and no symbols are in the program. It does not have the tags nvml and cuda:
# the bindings of the GPU driver need cgo.
.PHONY: static
static: ## bin/static/penstock: with io_uring and without cgo, for packages; runs on any Linux, and needs no library
	CGO_ENABLED=0 go build -trimpath -tags=uring -ldflags='-checklinkname=0 -s -w $(STAMP)' -o $(STATIC) ./cmd/penstock

.PHONY: image
image: static ## bin/image: what buildah, podman or docker build an OCI image of (docs/install.md)
	rm -rf $(IMAGE)
	install -D -m 0755 $(STATIC) $(IMAGE)/usr/bin/penstock
	install -d -m 0755 $(IMAGE)/var/lib/penstock
	install -m 0644 deploy/Dockerfile $(IMAGE)

.PHONY: deb
deb: static ## bin/penstock_*.deb: a Debian package with program, units, configurations and shell completions; fetches nfpm
	go -C deploy/deb build -o $(CURDIR)/bin/deb .
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null) bin/deb -program $(STATIC) -out $(DEB)

.PHONY: test-upgrade
test-upgrade: wheel ## volumes, index, clients, wheel and planner of the previous release against this one, and back; builds that release from git's history, once
	previous=$$(.ci/previous) && TEST_PREVIOUS_PENSTOCK=$$previous/penstock TEST_PREVIOUS_WHEEL=$$(echo $$previous/penstock-*.whl) TEST_WHEEL=$$(echo $(CURDIR)/bin/penstock-*.whl) \
		go test -count=1 -run TestUpgrade ./cmd/penstock

.PHONY: test-chart
test-chart: ## the Helm chart: rendered and linted by Helm, each object against the types of the Kubernetes API, settings and commands by the program; fetches their modules
	go -C deploy/helm vet .
	go -C deploy/helm test -count=1 .

.PHONY: test-kubernetes
test-kubernetes: ## the Helm chart in a real Kubernetes on this machine, which is built from Go modules, once; needs root, etcd-server, containerd, runc, containernetworking-plugins, iptables, buildah and busybox-static
	.ci/test-kubernetes

# The linker's version script hides all symbols but those of penstock.h. Go also writes a header, which is removed because penstock.h replaces it.
lib: ## bin/libpenstock.so and bin/penstock.h: the client for programs in C, and for Python; needs gcc
	go build -buildmode=c-shared -tags=cuda -ldflags='-s -w -extldflags=-Wl,--version-script=$(CURDIR)/client/capi/penstock.map' -o $(LIB)/libpenstock.so ./client/capi
	rm -f $(LIB)/libpenstock.h
	cp client/capi/penstock.h $(LIB)/penstock.h

wheel: ## bin/penstock-*.whl: the Python package with libpenstock and the program; fetches a C compiler that targets an old glibc
	.ci/wheel

test-python: wheel ## tests of the installed wheel on each installed Python; style and types of python/
	.ci/test-python

test-engines: wheel ## the wheel under transformers, vLLM, LMCache and SGLang on the CPU, with tiny random models; installs them once, 8 GB, outside the repository
	.ci/test-engines

.PHONY: test-dualpath-engines
test-dualpath-engines: wheel ## prefill and decode on vLLM's servers in network namespaces: agents' sessions, and faults in the middle of requests; needs root, ip and tc
	.ci/test-engines dualpath

.PHONY: gpu-kit test-gpu
gpu-kit: build wheel ## bin/gpu: all that .ci/test-gpu needs on a machine that has a GPU and no Go
	rm -rf bin/gpu && mkdir bin/gpu
	cp bin/penstock bin/penstock-*.whl bin/gpu/
	go test -c $(GOFLAGS_URING) -o bin/gpu/copier.test ./rdma/copier

test-gpu: gpu-kit ## the wheel, pinned and device memory, the connectors for vLLM, rdma/copier and NVML on an NVIDIA GPU; needs torch and transformers there
	.ci/test-gpu

demo: build ## a cluster on this machine: prefill's storage NICs alone, both sides', none
	bin/penstock demo --picture bin/demo.png

demo-node: build ## a node on a temporary directory, a real trace, real bytes
	bin/penstock demo node

.PHONY: quick
quick: ## gofmt, vet, and the tests that are not long (testkit.Long); results of unchanged packages come from the cache
	@unformatted=$$(gofmt -l .) && [ -z "$$unformatted" ] || { echo "gofmt -w $$unformatted"; exit 1; }
	go vet ./...
	go test -short ./...

test: ## all tests: test-program, test-checked and test-plain side by side, since their tests often wait; the limits are for a machine with other work
	$(MAKE) --no-print-directory -k -j4 test-program test-checked test-plain

test-plain: ## all packages but the program, in the plain build
	packages=$$(go list ./...) && go test -p 4 -timeout=40m $(LONGEST) $$(echo "$$packages" | grep -vx '.*/cmd/penstock')

.PHONY: test-program test-program-first test-program-rest compile-checked
test-program: test-program-first test-program-rest ## the program with io_uring and the invariants, by two processes with make -j

test-program-first: compile-checked
	go test -timeout=40m $(GOFLAGS_CHECKED) -run '$(HALF)' $(PROGRAM)

test-program-rest: compile-checked
	go test -timeout=40m $(GOFLAGS_CHECKED) -skip '$(HALF)' $(PROGRAM)

# Go commands that start at the same time would each compile the same packages.
compile-checked:
	@go test -run '^$$' $(GOFLAGS_CHECKED) $(PROGRAM)

test-checked: compile-checked ## the users of storage with io_uring and the invariants
	go test -timeout=40m $(GOFLAGS_CHECKED) $(CHECKED)

test-rdma: ## the verbs provider on soft-RoCE devices, a node over it, and ib_write_bw beside it, in a QEMU guest of its own
	go build -o bin/rdmalab ./lab/rdmalab
	$(WITH_VERBS) go vet -tags verbs ./rdma/verbs
	$(WITH_VERBS) go test -c -tags verbs -o bin/verbs.test ./rdma/verbs
	$(WITH_VERBS) go test -c -tags verbs -o bin/penstock.test ./cmd/penstock
	bin/rdmalab -timeout $(RDMA_TIMEOUT) -env PENSTOCK_RDMA_LAB=1 -bin bin/verbs.test -bin bin/penstock.test -- \
		verbs.test "penstock.test -test.run TestServeVerbs" "verbs.test -test.run '^\$$' -test.bench '$(RDMA_BENCH)' -test.benchtime 1x"

test-gluster: ## shared volumes on a GlusterFS of three bricks in network namespaces: a brick and a node killed under load, quorum lost; needs root, glusterfs-server and glusterfs-client
	go test -count=1 -v -timeout 15m -run 'TestGluster$$' ./cmd/penstock -gluster

.PHONY: test-cluster-rounds
# The number of faults that test-cluster-rounds makes, their seed, and the number of hits in each namespace that it awaits after each fault.
CLUSTER_ROUNDS ?= 200
CLUSTER_SEED ?= 1
CLUSTER_SETTLE ?= 6
test-cluster-rounds: build ## CLUSTER_ROUNDS random faults in a cluster of whole nodes, planners and etcd under load; writes the hit rates to bin/rounds; needs etcd-server
	go test -count=1 -v -timeout 3h -run 'TestRounds$$' ./lab/rounds -rounds.count=$(CLUSTER_ROUNDS) -rounds.seed=$(CLUSTER_SEED) -rounds.settle=$(CLUSTER_SETTLE) -rounds.binary=$(CURDIR)/bin/penstock -rounds.out=$(CURDIR)/bin/rounds

test-disks: build ## power cuts at POWER_CUTS flushes of a recorded load, drives that fail or hang, discards, and io_uring on Linux 6.1, on ext4 and xfs over NVMe drives of a QEMU guest
	go build -o bin/rdmalab ./lab/rdmalab
	go test -c $(GOFLAGS_URING) -o bin/crash.test ./lab/crash
	go test -c $(GOFLAGS_URING) -o bin/uring.test ./io/uring
	bin/rdmalab -equipment disks -drive 4G -drive 4G -memory 3072 -timeout $(DISKS_TIMEOUT) -bin bin/penstock -bin bin/crash.test -bin bin/uring.test \
		-env PENSTOCK_LAB_DRIVES=/dev/nvme0n1,/dev/nvme1n1 -env PENSTOCK_LAB_BINARY=/bin/penstock -env PENSTOCK_POWER_CUTS=$(POWER_CUTS) -- \
		"mkfs.ext4 -q -F /dev/nvme0n1 && mkfs.xfs -q -f /dev/nvme1n1 && mkdir /ext4 /xfs && mount -t ext4 /dev/nvme0n1 /ext4 && mount -t xfs /dev/nvme1n1 /xfs" \
		"TMPDIR=/ext4 uring.test -test.skip '$(NO_GO)'" "TMPDIR=/xfs uring.test -test.skip '$(NO_BOUNDS)'" "umount /ext4 /xfs" \
		"crash.test -test.v -test.timeout $(DISKS_TIMEOUT) -test.parallel 5 -test.run 'DriveFaults|Discards|PowerCuts'"

bench-verbs: build ## the verbs provider against ib_write_bw in the guest, ten minutes; writes bench/rdma-verbs.json and docs/benchmarks.md
	go build -o bin/rdmalab ./lab/rdmalab
	$(WITH_VERBS) go build -buildvcs=auto -tags verbs -o bin/penstock-verbs ./cmd/penstock
	bin/rdmalab -timeout 20m -env PENSTOCK_RDMA_LAB=1 -out bench -bin bin/penstock-verbs -- \
		"penstock-verbs bench rdma --provider verbs --rounds 3 --only '$(RDMA_ROWS)' --data /tmp --save /out/rdma-verbs.json"
	bin/penstock bench report bench/rdma-verbs.json

.PHONY: bench-hot
bench-hot: build ## the throughput of one prefix with and without copies on further nodes (docs/benchmarks/hot-prefixes.md); three minutes; needs root and etcd-server
	go test -count=1 -v -timeout 10m -run 'TestHot$$' ./lab/hot -hot.binary=$(CURDIR)/bin/penstock -hot.rounds=5

.PHONY: scale
scale: ## 1,000 members and 100,000 namespaces against a real etcd, and the rebalance of 1,000 nodes (docs/benchmarks/cluster-scale.md); an hour; needs etcd-server
	PENSTOCK_SCALE=1000,100000,60 go test -count=1 -v -timeout 1h -run 'TestCluster$$' ./lab/scale
	PENSTOCK_SCALE=200,1000 go test -count=1 -v -timeout 1h -run 'TestCluster$$' ./lab/scale
	PENSTOCK_SCALE=3,100000 go test -count=1 -v -timeout 1h -run 'TestCluster$$' ./lab/scale
	go test -count=1 -v -timeout 10m -run TestRebalance ./internal/placement -sequences 50000
	go test -run '^$$' -bench Homes ./internal/placement

memory-budget: ## whether a node with 32 M blocks stays within the memory that its status says; 3 GiB, some minutes
	PENSTOCK_MEMORY_BLOCKS=32000000 go test -count=1 -v -timeout 60m -run TestMemoryBudget ./cmd/penstock

race: ## the packages below the program with the race detector, io_uring and the invariants
	go test -p 3 -race $(GOFLAGS_CHECKED) $(RACE)

fuzz: ## every fuzz target for FUZZTIME, one after the other
	.ci/fuzz $(FUZZTIME)

bench: build wheel ## ratios against fio, iperf3, Redis, Mooncake, …; writes bench/ and docs/benchmarks.md
	.ci/bench

bench-compare: ## Go benchmarks of REF and of the working tree, by benchstat
	.ci/bench-compare $(REF) $(BENCHTIME)

reproduce: build ## the papers' tables beside ours, in under 15 minutes; writes bin/reproduction/ and docs/reproduction.md
	bin/penstock sim reproduce --out bin/reproduction --write docs/reproduction.md

reproduce-quick: build ## the same without the longest simulations and with one seed, in under 5 minutes; writes bin/reproduction/
	bin/penstock sim reproduce --quick --out bin/reproduction

lint: ## import DAG, docs, gofmt, vet, staticcheck
	go test ./internal/lint

ci: ## what a change must pass, an hour
	.ci/run

.PHONY: weekly
weekly: ## what takes hours: more rounds of what ci has, and the README's test command 20 times
	.ci/weekly

proto: ## needs protoc; the plugins come from go.mod
	go build -o bin/ google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
	PATH="$(CURDIR)/bin:$$PATH" protoc -I api --go_out=api --go_opt=paths=source_relative --go-grpc_out=api --go-grpc_opt=paths=source_relative api/penstockv1/*.proto

install: build
	install -D -m 0755 bin/penstock $(DESTDIR)$(PREFIX)/bin/penstock

clean:
	rm -rf bin

print-goflags-uring: ## for scripts
	@echo '$(GOFLAGS_URING)'
