package membership_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// name is the state of one name in the model: whether there is a namespace of that name, and its
// newest or last epoch. Epoch 0: the name was never used.
type name struct {
	exists bool
	epoch  kv.Epoch
}

type operation struct {
	kind string // create, bump, delete
	name string
}

// outcome is the result of an operation.
type outcome struct {
	// unknown: the call failed in a way that does not say whether the change was made.
	unknown bool
	// absent: there was no namespace.
	absent bool
	epoch  kv.Epoch // of a bump
}

// step returns the states after an operation, none if the outcome is impossible in the state s.
func step(s name, op operation, out outcome) []any {
	next := s
	switch {
	case op.kind == "create" && !s.exists:
		next = name{true, s.epoch + 1}
	case op.kind == "bump" && s.exists:
		next.epoch++
	case op.kind == "delete" && s.exists:
		next.exists = false
	}
	switch {
	case out.unknown:
		return []any{s, next}
	case op.kind != "create" && out.absent == s.exists:
		return nil
	case op.kind == "bump" && !out.absent && out.epoch != next.epoch:
		return nil
	}
	return []any{next}
}

// TestLinearizable: namespaces are created, bumped and deleted through several nodes, while nodes
// are cut off, and members of etcd die and return. The results are those of some order of the calls in
// which a call that returned before another began comes first (checked with porcupine).
func TestLinearizable(t *testing.T) {
	r := newRig(t, 3)
	nodes := []*node{r.join("a"), r.join("b"), r.join("c")}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	began := time.Now()
	var mu sync.Mutex
	var history []porcupine.Operation
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for client := range 4 {
		rnd := rand.New(rand.NewPCG(seed, uint64(client)))
		wg.Go(func() {
			tick := time.NewTicker(20 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
				case <-stop:
					return
				}
				op := operation{[]string{"create", "bump", "bump", "delete"}[rnd.IntN(4)], fmt.Sprintf("m%d", rnd.IntN(2))}
				n := nodes[rnd.IntN(len(nodes))]
				ctx, cancel := context.WithTimeout(r.ctx, ttl)
				begin := time.Since(began)
				var out outcome
				var err error
				switch op.kind {
				case "create":
					_, err = n.CreateNamespace(ctx, kv.Namespace{Name: op.name, Geometry: geo, Index: kv.IndexTrie})
				case "bump":
					b, bumpErr := n.BumpEpoch(ctx, op.name, 0, 1)
					if err = bumpErr; err == nil {
						out.epoch = b.Live[0]
					}
				case "delete":
					_, err = n.DeleteNamespace(ctx, op.name, false)
				}
				cancel()
				end := int64(time.Since(began))
				switch {
				case errors.Is(err, trie.ErrNamespaceUnknown):
					out.absent = true
				case err != nil:
					out.unknown, end = true, math.MaxInt64
				}
				mu.Lock()
				history = append(history, porcupine.Operation{ClientId: client, Input: op, Call: int64(begin), Output: out, Return: end})
				mu.Unlock()
			}
		})
	}
	rnd := rand.New(rand.NewPCG(seed, 99))
	for round := range testkit.Rounds(4, 2) {
		<-time.After(time.Duration(rnd.Int64N(int64(ttl / 4))))
		if round%2 == 0 {
			n := nodes[rnd.IntN(len(nodes))]
			n.cut()
			<-time.After(ttl/4 + time.Duration(rnd.Int64N(int64(ttl))))
			n.mend()
			continue
		}
		m := rnd.IntN(3)
		r.etcd.Kill(m)
		<-time.After(time.Duration(rnd.Int64N(int64(ttl / 2))))
		r.etcd.Run(m)
	}
	close(stop)
	wg.Wait()
	model := porcupine.NondeterministicModel{
		Partition: func(all []porcupine.Operation) [][]porcupine.Operation {
			parts := make(map[string][]porcupine.Operation)
			for _, op := range all {
				parts[op.Input.(operation).name] = append(parts[op.Input.(operation).name], op)
			}
			var out [][]porcupine.Operation
			for _, part := range parts {
				out = append(out, part)
			}
			return out
		},
		Init: func() []any { return []any{name{}} },
		Step: func(s, in, out any) []any { return step(s.(name), in.(operation), out.(outcome)) },
	}
	unknown := 0
	for _, op := range history {
		if op.Output.(outcome).unknown {
			unknown++
		}
	}
	t.Logf("%d calls, of which %d have an unknown result", len(history), unknown)
	if result := porcupine.CheckOperationsTimeout(model.ToModel(), history, time.Minute); result != porcupine.Ok {
		t.Errorf("the history of %d calls is %v", len(history), result)
	}
}
