package crash

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var geometry = kv.SingleGroup(4, 16, 256) // 16 KiB a block

const (
	chainBlocks = 24
	// Each life works on branches chains, of which fresh are new, and reads back history of the
	// older chains. Ten consecutive chains share their first half.
	branches = 40
	fresh    = 8
	history  = 60
	workers  = 4
)

// volume is one data directory, used in several lives of the process.
type volume struct {
	name       string
	dir        string
	durability string
	capacity   string
	// roomy is set if the volume evicts nothing, so that every acknowledged block must be found.
	roomy bool

	mu    sync.Mutex
	acked map[int]int // seed of a chain → blocks acknowledged
	lives int
}

// rounds returns PENSTOCK_CRASH_ROUNDS, or otherwise if the variable is not set.
func rounds(t *testing.T, otherwise int) int {
	t.Helper()
	s := os.Getenv("PENSTOCK_CRASH_ROUNDS")
	if s == "" {
		return otherwise
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatalf("PENSTOCK_CRASH_ROUNDS=%q is not a number", s)
	}
	return n
}

func TestKillLoop(t *testing.T) {
	testkit.Long(t, "a node is killed and started again many times")
	rounds := rounds(t, 8)
	binary := buildBinary(t)
	volumes := []*volume{
		{name: "sync", dir: t.TempDir(), durability: "sync", capacity: "4GiB", roomy: true, acked: map[int]int{}},
		{name: "batch", dir: t.TempDir(), durability: "batch", capacity: "24MiB", acked: map[int]int{}},
	}
	totals := &counts{}
	for round := range rounds {
		v := volumes[round%len(volumes)]
		rng := rand.New(rand.NewPCG(uint64(round), 0xDEAD))
		v.round(t, binary, rng, totals)
		if t.Failed() {
			t.Fatalf("round %d on volume %s", round, v.name)
		}
	}
	t.Logf("%d rounds of kill -9: %v", rounds, totals)
	if totals.wrong.Load() != 0 || totals.lost.Load() != 0 {
		t.Errorf("%d wrong blocks, %d acknowledged blocks lost", totals.wrong.Load(), totals.lost.Load())
	}
	if totals.verified.Load() == 0 || totals.written.Load() == 0 {
		t.Error("the loop did nothing")
	}
}

// envBinary is the path of the penstock program to test. The guest of make test-disks sets it, because it has no compiler.
const envBinary = "PENSTOCK_LAB_BINARY"

// buildBinary builds the program that is shipped.
func buildBinary(t *testing.T) string {
	t.Helper()
	if binary := os.Getenv(envBinary); binary != "" {
		return binary
	}
	return testkit.BuildPenstock(t, buildFlags...)
}

// counts are the counts of all rounds.
type counts struct {
	written, verified, wrong, lost, recovered atomic.Int64
}

func (c *counts) String() string {
	return fmt.Sprintf("%d blocks written, %d read and verified (%d right after a restart), %d wrong, %d acknowledged blocks lost",
		c.written.Load(), c.verified.Load(), c.recovered.Load(), c.wrong.Load(), c.lost.Load())
}

// node is one life of the process.
type node struct {
	cmd    *exec.Cmd
	listen string
	gone   chan struct{}
	log    *bytes.Buffer
}

// readyLine matches the log line with the address at which the node listens.
var readyLine = regexp.MustCompile(`msg=ready .*\blisten=(\S+)`)

// start runs the node and returns when it logs that it is ready.
func (v *volume) start(t *testing.T, binary string) *node {
	t.Helper()
	n, err := v.tryStart(binary)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// tryStart runs the node until it is ready or has ended. It adds flags to the common flags.
func (v *volume) tryStart(binary string, flags ...string) (*node, error) {
	n := &node{gone: make(chan struct{}), log: &bytes.Buffer{}}
	n.cmd = exec.Command(binary, append([]string{"serve", "--data", v.dir, "--capacity", v.capacity, "--durability", v.durability,
		"--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0", "--http", "", "--arena", "32MiB", "--segment", "2MiB", "--index-cache", "8MiB",
		"--free-floor", "0", "--sync-interval", "50ms"}, flags...)...)
	// The node rejects environment variables with the prefix PENSTOCK_ that are not configuration
	// keys, such as the variables of this test.
	n.cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "PENSTOCK_") })
	stderr, err := n.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := n.cmd.Start(); err != nil {
		return nil, err
	}
	ready := make(chan string, 1)
	go func() {
		defer close(n.gone)
		lines := bufio.NewScanner(stderr)
		for lines.Scan() {
			n.log.WriteString(lines.Text() + "\n")
			if m := readyLine.FindStringSubmatch(lines.Text()); m != nil {
				ready <- m[1]
			}
		}
		_ = n.cmd.Wait() // the error is expected, because the process was killed
		ready <- ""
	}()
	if n.listen = <-ready; n.listen == "" {
		<-n.gone
		return nil, fmt.Errorf("volume %s does not start in its life %d:\n%s", v.name, v.lives, n.log)
	}
	v.lives++
	return n, nil
}

func (n *node) kill(t *testing.T) {
	if err := n.cmd.Process.Kill(); err != nil {
		t.Errorf("kill: %v", err)
	}
	<-n.gone
}

// content fills buf with the content of block id.
func content(id kv.BlockID, buf []byte) {
	rng := rand.New(rand.NewPCG(binary.LittleEndian.Uint64(id[:8]), binary.LittleEndian.Uint64(id[8:])))
	for i := 0; i < len(buf); i += 8 {
		binary.LittleEndian.PutUint64(buf[i:], rng.Uint64())
	}
}

// chain returns the ids of a seed's prompt. Ten seeds share the first half of their prompts.
func chain(ns kv.Namespace, seed int) []kv.BlockID {
	n := chainBlocks * geometry.BlockTokens
	return chainOf(ns, n, func(i int) int {
		if i < n/2 {
			return seed/10*10*1_000_003 + i
		}
		return seed*1_000_003 + i
	})
}

// chainOf returns the ids of a prompt of n tokens.
func chainOf(ns kv.Namespace, n int, token func(i int) int) []kv.BlockID {
	c, err := ns.Chain()
	if err != nil {
		panic(err)
	}
	tokens := make([]kv.Token, n)
	for i := range tokens {
		tokens[i] = kv.Token(token(i))
	}
	ids, _ := c.Append(nil, tokens)
	return ids
}

// session is one client in one life.
type session struct {
	t      *testing.T
	v      *volume
	ns     kv.Namespace
	store  *client.Store
	totals *counts
	close  func()
}

func (v *volume) connect(t *testing.T, n *node, totals *counts) *session {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	conn, err := client.Dial(n.listen, client.DialOptions{Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	m, err := pb.NewAdminClient(conn).CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: "m", Geometry: api.GeometryProto(geometry)}})
	if err != nil {
		t.Fatalf("namespace: %v\n%s", err, n.log)
	}
	ns, err := api.Namespace(m)
	if err != nil {
		t.Fatal(err)
	}
	store, closeStore, err := openStore(ctx, n.listen)
	if err != nil {
		t.Fatal(err)
	}
	return &session{t: t, v: v, ns: ns, store: store, totals: totals, close: func() {
		if err := closeStore(); err != nil {
			t.Errorf("close the client: %v", err)
		}
	}}
}

// openStore connects an engine to the node.
func openStore(ctx context.Context, listen string) (store *client.Store, closeAll func() error, err error) {
	engine, err := tcp.New(ctx, tcp.Options{})
	if err != nil {
		return nil, nil, err
	}
	store, err = client.Open(ctx, client.Options{Servers: []string{listen}, Engine: engine, DialTimeout: time.Minute, RetryMax: -1})
	if err != nil {
		return nil, nil, errors.Join(err, engine.Close())
	}
	return store, func() error { return errors.Join(store.Close(), engine.Close()) }, nil
}

// round is one life: read back, load, kill.
func (v *volume) round(t *testing.T, binary string, rng *rand.Rand, totals *counts) {
	n := v.start(t, binary)
	s := v.connect(t, n, totals)
	defer s.close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	s.readBack(ctx)
	if t.Failed() {
		t.Logf("the node's log:\n%s", n.log)
		n.kill(t)
		return
	}
	// The kill happens at a random operation, not at a time. It interrupts the operations that the
	// other clients are running then.
	var ops atomic.Int64
	fatal := int64(20 + rng.IntN(400))
	killed := make(chan struct{})
	var once sync.Once
	step := func() bool {
		if ops.Add(1) >= fatal {
			once.Do(func() {
				n.kill(t)
				close(killed)
			})
		}
		select {
		case <-killed:
			return false
		default:
			return ctx.Err() == nil
		}
	}
	var wg sync.WaitGroup
	for w := range workers {
		seed := rng.Uint64()
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(w)))
			mem := s.memory()
			defer mem.release()
			for step() {
				if w%2 == 0 {
					s.write(ctx, mem, v.lives*fresh+rng.IntN(branches), 1+rng.IntN(chainBlocks))
				} else {
					s.read(ctx, mem, v.lives*fresh+rng.IntN(branches))
				}
			}
		})
	}
	wg.Wait()
}

// buffer is registered memory for one chain.
type buffer struct {
	mem     *client.Memory
	release func()
}

func (s *session) memory() buffer {
	mem, err := s.store.Register(make([]byte, chainBlocks*geometry.BlockBytes()))
	if err != nil {
		s.t.Error(err)
		return buffer{release: func() {}}
	}
	return buffer{mem, func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := mem.Close(ctx); err != nil {
			s.t.Errorf("memory: %v", err)
		}
	}}
}

func (s *session) write(ctx context.Context, b buffer, seed, blocks int) {
	ids := chain(s.ns, seed)[:blocks]
	size := geometry.BlockBytes()
	for i, id := range ids {
		content(id, b.mem.Bytes()[int64(i)*size:][:size])
	}
	res, err := s.store.Write(ctx, client.WriteRequest{Namespace: s.ns, IDs: ids, From: b.mem})
	if err != nil && ctx.Err() == nil {
		s.t.Errorf("write: %v", err)
	}
	s.totals.written.Add(int64(res.Stored))
	s.v.mu.Lock()
	defer s.v.mu.Unlock()
	s.v.acked[seed] = max(s.v.acked[seed], res.Blocks)
}

// read loads a chain and checks every delivered block. It returns the number of delivered blocks.
func (s *session) read(ctx context.Context, b buffer, seed int) int {
	ids := chain(s.ns, seed)
	for i := range b.mem.Bytes() {
		b.mem.Bytes()[i] = 0xEE // bytes that were not delivered must not pass the check
	}
	res, err := s.store.Read(ctx, client.ReadRequest{Namespace: s.ns, IDs: ids, Into: b.mem})
	if err != nil {
		if ctx.Err() == nil {
			s.t.Errorf("read: %v", err)
		}
		return 0
	}
	size := geometry.BlockBytes()
	want := make([]byte, size)
	for i := range res.Blocks {
		content(ids[i], want)
		if !bytes.Equal(b.mem.Bytes()[int64(i)*size:][:size], want) {
			s.totals.wrong.Add(1)
			s.t.Errorf("WRONG BYTES in block %d of chain %d", i, seed)
		}
	}
	s.totals.verified.Add(int64(res.Blocks))
	return res.Blocks
}

// readBackPatience is the time for which readBack reads chains again whose blocks it misses. A block is also a
// miss while the node is down for its clients, because a busy machine gave it no CPU.
const readBackPatience = time.Minute

// readBack checks the blocks of the last life.
func (s *session) readBack(ctx context.Context) {
	mem := s.memory()
	defer mem.release()
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	deadline := time.Now().Add(readBackPatience)
	for seed := max(0, s.v.lives*fresh-history); seed < s.v.lives*fresh+branches; seed++ {
		got, want := s.read(ctx, mem, seed), s.v.acked[seed]
		for s.v.roomy && got < want && time.Now().Before(deadline) && ctx.Err() == nil {
			<-again.C
			got = s.read(ctx, mem, seed)
		}
		s.totals.recovered.Add(int64(got))
		if s.v.roomy && got < want {
			s.totals.lost.Add(int64(want - got))
			s.t.Errorf("chain %d: %d blocks were acknowledged with durability sync, %d were found", seed, want, got)
		}
	}
}
