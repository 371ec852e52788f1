package front

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/internal/prefixset"
	"github.com/penstock-kv/penstock/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// newPool returns a pool of n healthy engines named 0, 1, …
func newPool(n, maxLoad, maxWaiting int) *pool {
	p := &pool{maxLoad: maxLoad, maxWaiting: maxWaiting, maxWait: 10 * time.Second, loadFactor: 1.25, interval: time.Second, log: slog.New(slog.DiscardHandler)}
	for i := range n {
		p.engines = append(p.engines, &engine{name: fmt.Sprint(i), base: &url.URL{}, suspect: make(chan struct{}, 1), index: prefixset.New(1000), healthy: true})
	}
	p.metrics = newMetrics(prometheus.NewRegistry(), p.engines)
	return p
}

// conversation returns the ticket of a prompt of n blocks. Prompts with the same seed share a
// prefix.
func conversation(seed uint64, n int) *ticket {
	return &ticket{prompt: prompt{chains: [][]uint64{appendChain(nil, seed, make([]byte, n*blockBytes))}, blocks: n}}
}

func (p *pool) must(t *testing.T, c *ticket) *engine {
	t.Helper()
	e, err := p.acquire(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// TestPrefixesStay: the turns of a conversation go to one engine, and conversations are spread over
// all engines.
func TestPrefixesStay(t *testing.T) {
	p := newPool(4, 100, 100)
	home := make(map[uint64]*engine)
	count := make(map[*engine]int)
	for turn := 1; turn <= 5; turn++ {
		for seed := uint64(1); seed <= 40; seed++ {
			e := p.must(t, conversation(seed, 8+4*turn))
			if home[seed] == nil {
				home[seed] = e
				count[e]++
			}
			if home[seed] != e {
				t.Errorf("turn %d of conversation %d went to engine %s; the first to %s", turn, seed, e.name, home[seed].name)
			}
			p.release(e)
		}
	}
	for _, e := range p.engines {
		if count[e] != 10 {
			t.Errorf("engine %s has %d of 40 conversations", e.name, count[e])
		}
	}
}

// TestShortPromptsRotate: prompts without a whole block go to the engine with the fewest requests.
func TestShortPromptsRotate(t *testing.T) {
	p := newPool(3, 100, 100)
	for range 30 {
		p.must(t, &ticket{})
	}
	for _, e := range p.engines {
		if e.load != 10 {
			t.Errorf("engine %s has %d of 30 requests", e.name, e.load)
		}
	}
}

// TestPopularPrefixSpreads: with any prompts, no engine gets more than the bound.
func TestPopularPrefixSpreads(t *testing.T) {
	p := newPool(4, 1000, 100)
	for i := range 400 {
		p.must(t, conversation(1, 20))
		for _, e := range p.engines {
			if bound := max(boundMin, (125*(i+1)/4+99)/100); e.load > bound {
				t.Fatalf("engine %s has %d of %d requests; the bound is %d", e.name, e.load, i+1, bound)
			}
		}
	}
	if p.engines[0].load+p.engines[1].load+p.engines[2].load+p.engines[3].load != 400 {
		t.Error("requests are lost")
	}
}

// TestLostEngineHasNoBlocks: the blocks of an engine are dropped when its connection fails.
func TestLostEngineHasNoBlocks(t *testing.T) {
	p := newPool(2, 100, 100)
	e := p.must(t, conversation(1, 20))
	p.release(e)
	p.failed(e, errors.New("502"), false)
	p.polled(e, nil)
	if e.hits(conversation(1, 20).prompt) != 20 {
		t.Error("an engine that answered 502 has no blocks")
	}
	p.failed(e, errors.New("connection refused"), true)
	other := p.must(t, conversation(1, 20))
	if other == e || e.index.Len() != 0 {
		t.Errorf("engine %s serves after its connection failed, and has %d blocks", other.name, e.index.Len())
	}
	p.polled(e, nil)
	if again := p.must(t, conversation(1, 20)); again != other {
		t.Error("the prompt goes to the engine whose blocks were dropped")
	}
}

func TestQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2, 1, 2)
		a, b := p.must(t, &ticket{}), p.must(t, &ticket{})
		type result struct {
			n   int
			e   *engine
			err error
		}
		results := make(chan result, 10)
		ask := func(n int, ctx context.Context, c *ticket) {
			go func() {
				e, err := p.acquire(ctx, c)
				results <- result{n, e, err}
			}()
			synctest.Wait()
		}
		ask(1, t.Context(), &ticket{})
		ask(2, t.Context(), &ticket{})
		ask(3, t.Context(), &ticket{})
		if r := <-results; r.n != 3 || !errors.Is(r.err, errQueueFull) {
			t.Errorf("request %d: %v; want that the third found the queue full", r.n, r.err)
		}
		p.release(b)
		if r := <-results; r.n != 1 || r.e != b {
			t.Errorf("request %d got %v, %v; want that the first got engine 1", r.n, r.e, r.err)
		}
		// A request that an engine has failed is served before requests without an attempt.
		ask(4, t.Context(), &ticket{tried: []*engine{a}})
		p.release(b)
		if r := <-results; r.n != 4 || r.e != b {
			t.Errorf("request %d got %v, %v; want that the further attempt got engine 1", r.n, r.e, r.err)
		}
		before := time.Now()
		if r := <-results; r.n != 2 || !errors.Is(r.err, errQueueWait) || time.Since(before) != p.maxWait {
			t.Errorf("request %d: %v after %v; want the end of its wait", r.n, r.err, time.Since(before))
		}
		ctx, cancel := context.WithCancel(t.Context())
		ask(5, ctx, &ticket{})
		cancel()
		if r := <-results; r.n != 5 || !errors.Is(r.err, context.Canceled) {
			t.Errorf("request %d: %v; want that it was cancelled", r.n, r.err)
		}
		// When the last engine fails, the waiting requests end.
		ask(6, t.Context(), &ticket{})
		p.failed(a, errors.New("reset"), true)
		p.failed(b, errors.New("reset"), true)
		if r := <-results; r.n != 6 || !errors.Is(r.err, errNoEngine) {
			t.Errorf("request %d: %v; want no engine", r.n, r.err)
		}
		if _, err := p.acquire(t.Context(), &ticket{}); !errors.Is(err, errNoEngine) {
			t.Errorf("%v; want no engine", err)
		}
		if len(p.waiting) != 0 {
			t.Errorf("%d requests wait", len(p.waiting))
		}
	})
}

// TestNoEngineLeft: a waiting request that has tried all healthy engines ends. An engine with room
// gets the first waiting request that has not tried it.
func TestNoEngineLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(3, 1, 10)
		a, b, c := p.engines[0], p.engines[1], p.engines[2]
		for range p.engines {
			p.must(t, &ticket{})
		}
		type result struct {
			e   *engine
			err error
		}
		ask := func(tried ...*engine) chan result {
			got := make(chan result, 1)
			go func() {
				e, err := p.acquire(t.Context(), &ticket{tried: tried})
				got <- result{e, err}
			}()
			synctest.Wait()
			return got
		}
		fresh, triedA, triedAB := ask(), ask(a), ask(a, b)
		p.release(a)
		if r := <-fresh; r.e != a || r.err != nil || len(p.waiting) != 2 {
			t.Errorf("the request that has tried no engine got %v, %v, and %d wait", r.e, r.err, len(p.waiting))
		}
		p.failed(c, errors.New("502"), false)
		if r := <-triedAB; !errors.Is(r.err, errNoEngine) || len(p.waiting) != 1 {
			t.Errorf("the request without an engine got %v, %v, and %d wait", r.e, r.err, len(p.waiting))
		}
		p.release(c)
		synctest.Wait()
		if len(triedA) != 0 {
			t.Error("an engine that is down got a request")
		}
		p.polled(c, nil)
		if r := <-triedA; r.e != c || r.err != nil {
			t.Errorf("the last request got %v, %v; want the engine that is healthy again", r.e, r.err)
		}
		if n := len(p.waiting); n != 0 {
			t.Errorf("%d requests wait", n)
		}
	})
}

// TestWatch: an engine is polled at the start, then at intervals, less often while it is down, and
// at once after a failed request.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1, 1, 1)
		e := p.engines[0]
		e.healthy = false
		polls := make(chan time.Time)
		answers := make(chan error)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			p.watch(ctx, e, func(context.Context, *engine) error {
				polls <- time.Now()
				return <-answers
			})
		}()
		last := time.Now()
		poll := func(after time.Duration, answer error, healthy bool) {
			t.Helper()
			at := <-polls
			if at.Sub(last) != after {
				t.Errorf("polled after %v; want %v", at.Sub(last), after)
			}
			last = at
			answers <- answer
			synctest.Wait()
			if p.anyHealthy() != healthy {
				t.Errorf("healthy: %v", !healthy)
			}
		}
		down := errors.New("down")
		poll(0, down, false)
		poll(time.Second, down, false)
		poll(2*time.Second, down, false)
		poll(4*time.Second, nil, true)
		poll(time.Second, nil, true)
		// A busy engine may miss polls.
		poll(time.Second, down, true)
		poll(time.Second, down, true)
		poll(time.Second, nil, true)
		poll(time.Second, down, true)
		poll(time.Second, down, true)
		poll(time.Second, down, false)
		poll(4*time.Second, nil, true)
		// Requests fail although polls succeed.
		p.failed(e, down, true)
		if p.anyHealthy() {
			t.Error("an engine that failed a request is healthy")
		}
		poll(0, nil, true)
		p.failed(e, down, true)
		poll(time.Second, nil, true)
		p.failed(e, down, true)
		poll(2*time.Second, nil, true)
		p.served(e)
		p.failed(e, down, true)
		poll(0, nil, true)
		cancel()
		<-done
	})
}

func TestBackoff(t *testing.T) {
	for _, c := range []struct {
		interval time.Duration
		failures int
		want     time.Duration
	}{{time.Second, 1, time.Second}, {time.Second, 4, 8 * time.Second}, {time.Second, 1000, backoffMax}, {time.Minute, 3, time.Minute}} {
		if got := backoff(c.interval, c.failures); got != c.want {
			t.Errorf("backoff(%v, %d) is %v; want %v", c.interval, c.failures, got, c.want)
		}
	}
}

// BenchmarkRelease ends a request and assigns its engine to one of 1024 waiting requests.
func BenchmarkRelease(b *testing.B) {
	for _, blocks := range []int{0, 64} {
		b.Run(fmt.Sprintf("blocks=%d", blocks), func(b *testing.B) {
			p := newPool(8, 32, 1024)
			for _, e := range p.engines {
				e.load = p.maxLoad
			}
			for i := range p.maxWaiting {
				c := conversation(uint64(i), blocks)
				c.granted = make(chan *engine, 1)
				p.waiting = append(p.waiting, c)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				first := p.waiting[0]
				p.release(p.engines[i%len(p.engines)])
				if <-first.granted == nil || len(p.waiting) != p.maxWaiting-1 {
					b.Fatal("the first request did not get the engine")
				}
				p.waiting = append(p.waiting, first)
			}
		})
	}
}
