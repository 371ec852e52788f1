package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/dualpath/redistribute"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/lab/roundtrip"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/fabric"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/shm"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/rdma/verbs"
)

func newFabricCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "fabric",
		Short: "Measure the time of small and large round trips of a transfer engine",
	}
	return noun(cmd, newFabricProbe(w))
}

// fabricProbe has the flags of `penstock fabric probe`.
type fabricProbe struct {
	provider, listen, peer, tokenFile, name, write string
	rows                                           []int
	warmup, repeats, flows                         int
	timeout                                        time.Duration
}

func newFabricProbe(w world) *cobra.Command {
	var p fabricProbe
	cmd := &cobra.Command{
		Use:   "probe",
		Short: "Measure the two constants of a fabric: its probe and its bandwidth",
		Long: `Make round trips as a routed query does, for batches of many sizes in turns: one one-sided
write sends rows of 1152 bytes, and another sends 1032 bytes a row back. Round trips
without payload measure the signal alone. A straight line is fitted to the times (robust
least squares of the relative error): time = probe + turnaround + bytes/bandwidth. The
printed error of the fit (MAPE) shows whether the fabric is linear.

Both ends are in this process, over loopback, or on two hosts:

  host A    penstock fabric probe --listen 10.0.0.1:7440 --token-file secret
  host B    penstock fabric probe --peer 10.0.0.1:7440 --token-file secret --write ab.json

With --flows K the command measures again with 1 to K other flows, which make round trips
of the largest batch all the time, and prints the number of flows that fills the link.

--listen answers until interrupted. With --provider shm addresses are paths of sockets.
The file of --write is an input of penstock plan redistribute --fabric.`,
		Example: `  penstock fabric probe
  penstock fabric probe --provider shm --write shm.json`,
		Args: args(cobra.NoArgs),
	}
	f := cmd.Flags()
	f.StringVar(&p.provider, "provider", "tcp", "transfer engine: tcp, shm, verbs or fabric")
	completeValues(cmd, "provider", "tcp", "shm", "verbs", "fabric")
	f.StringVar(&p.listen, "listen", "", "address on which to run the far end, host:port, until interrupted")
	f.StringVar(&p.peer, "peer", "", "address of the far end, host:port")
	f.StringVar(&p.tokenFile, "token-file", "", "file with the secret of both ends; required beyond loopback")
	f.StringVar(&p.name, "name", "", "name of the fabric in the result (default: the provider's, and the peer)")
	f.StringVar(&p.write, "write", "", "also write the constants to this file, as JSON")
	f.IntSliceVar(&p.rows, "rows", []int{1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096}, "batches, in query rows")
	f.IntVar(&p.warmup, "warmup", 50, "round trips of each batch before it is measured")
	f.IntVar(&p.repeats, "repeats", 200, "round trips of each batch")
	f.IntVar(&p.flows, "flows", 0, "also measure with up to this many other flows")
	f.DurationVar(&p.timeout, "timeout", 2*time.Minute, "time limit of the command")
	cmd.MarkFlagsMutuallyExclusive("listen", "peer")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := p.check(); err != nil {
			return usageError{err}
		}
		if p.listen != "" {
			return p.answer(cmd.Context(), w)
		}
		r, err := p.run(cmd.Context(), w)
		if err != nil {
			return err
		}
		if err := outputOf(cmd).emit(r, func(t *table) { r.print(t) }); err != nil || p.write == "" {
			return err
		}
		return writeFabric(p.write, r.Fabric)
	}
	return cmd
}

// rowsMax is the maximum number of rows in a batch. That many rows are 64 MiB of queries.
const rowsMax = 1 << 16

// check returns an error for an invalid command line.
func (p fabricProbe) check() error {
	if len(p.rows) < 2 || len(p.rows) >= roundtrip.MaxShapes {
		return fmt.Errorf("--rows: %d batches; give 2 to %d", len(p.rows), roundtrip.MaxShapes-1)
	}
	for _, n := range p.rows {
		if n < 1 || n > rowsMax {
			return fmt.Errorf("--rows %d: it must be between 1 and %d", n, rowsMax)
		}
	}
	switch {
	case !slices.Contains([]string{"tcp", "shm", "verbs", "fabric"}, p.provider):
		return fmt.Errorf("--provider %q: want tcp, shm, verbs or fabric", p.provider)
	case p.repeats < 1 || p.warmup < 0 || p.repeats > 1e5 || p.warmup > 1e5:
		return fmt.Errorf("--repeats %d --warmup %d: --repeats must be 1 to 100000, and --warmup 0 to 100000", p.repeats, p.warmup)
	case len(p.rows)*p.repeats > 1<<20:
		return fmt.Errorf("%d batches with %d repeats each: the maximum is %d round trips", len(p.rows), p.repeats, 1<<20)
	case p.flows < 0 || p.flows >= roundtrip.MaxRequesters-1:
		return fmt.Errorf("--flows %d: it must be between 0 and %d", p.flows, roundtrip.MaxRequesters-2)
	case p.timeout <= 0:
		return fmt.Errorf("--timeout %v: it must be positive", p.timeout)
	}
	for flag, addr := range map[string]string{"--listen": p.listen, "--peer": p.peer} {
		if addr == "" || p.provider == "shm" {
			continue
		}
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			return fmt.Errorf("%s %q is not host:port", flag, addr)
		}
		if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) && p.tokenFile == "" {
			return fmt.Errorf("%s %s reaches beyond this machine: give both ends --token-file with one secret (openssl rand -hex 32 > FILE)", flag, addr)
		}
	}
	return nil
}

// loopbackToken is the token of both ends if the user gives none. It need not be secret: both ends
// are then on this machine, and only scratch memory is registered.
const loopbackToken = "penstock-fabric-probe-on-loopback"

// token returns the secret token that both ends use.
func (p fabricProbe) token() (rdma.Token, error) {
	switch {
	case p.tokenFile != "":
		text, err := readToken(p.tokenFile)
		return rdma.Token(text), err
	case p.listen != "" || p.peer != "":
		return rdma.Token(loopbackToken), nil
	}
	t := make(rdma.Token, 2*rdma.MinToken)
	_, err := rand.Read(t)
	return t, err
}

// end is one end of the measurement: a transfer engine with its scratch memory.
type end struct {
	rdma.Engine
	memory *arena.Arena
}

func (e end) Close() error { return errors.Join(e.Engine.Close(), e.memory.Close()) }

// open starts an engine that listens on the address listen; with "" the engine does not listen.
func (p fabricProbe) open(ctx context.Context, listen string, token rdma.Token) (_ end, err error) {
	half := int64(slices.Max(p.rows)) * int64(redistribute.DeepSeekV2Lite().Query)
	half = (half + 1<<20 - 1) >> 20 << 20
	if p.listen != "" {
		half = rowsMax * int64(redistribute.DeepSeekV2Lite().Query)
	}
	memory, err := arena.New(arena.Options{SizeBytes: 2 * half, Shared: p.provider == "shm"})
	if err != nil {
		return end{}, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, memory.Close())
		}
	}()
	if listen == "" {
		token = nil
	}
	var e rdma.Engine
	switch p.provider {
	case "shm":
		e, err = shm.New(ctx, shm.Options{Listen: listen, Arenas: []*arena.Arena{memory}, Group: group.Options{Token: token}})
	case "verbs", "fabric":
		g := group.Options{Token: token}
		if g.Control, err = group.TCP(ctx, listen, "", nil); err != nil {
			return end{}, err
		}
		if p.provider == "verbs" {
			e, err = verbs.New(ctx, verbs.Options{Devices: verbsDevices(), Group: g})
		} else {
			e, err = fabric.New(ctx, fabric.Options{Domain: fabric.DomainOptions{Provider: fabricProvider}, Group: g})
		}
	default:
		e, err = tcp.New(ctx, tcp.Options{Listen: listen, Token: token, ZeroCopy: true})
	}
	if err != nil {
		return end{}, err
	}
	return end{e, memory}, nil
}

// answer runs the end that answers round trips (the far end) until ctx ends.
func (p fabricProbe) answer(ctx context.Context, w world) (err error) {
	token, err := p.token()
	if err != nil {
		return err
	}
	e, err := p.open(ctx, p.listen, token)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	a, err := roundtrip.NewAnswerer(e, e.memory.Bytes())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAnswerer(ctx, a)) }()
	fmt.Fprintf(w.err, "answering over %s at %s until interrupted\n", p.provider, nicsOf(e))
	<-ctx.Done()
	return nil
}

// closeAnswerer closes with its own time limit, because ctx has ended.
func closeAnswerer(ctx context.Context, a *roundtrip.Answerer) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	return a.Close(ctx)
}

// nicsOf returns the addresses on which an engine listens.
func nicsOf(e rdma.Engine) string {
	if nics := e.Addr().NICs; len(nics) > 0 {
		return string(nics[0])
	}
	return "no address"
}

// run measures round trips to the far end. Without --peer, run starts the far end itself.
func (p fabricProbe) run(ctx context.Context, w world) (_ fabricResult, err error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	token, err := p.token()
	if err != nil {
		return fabricResult{}, err
	}
	to := rdma.Addr{NICs: []rdma.NetAddr{rdma.NetAddr(p.peer)}}
	if p.peer == "" {
		listen := "127.0.0.1:0"
		if p.provider == "shm" {
			dir, err := os.MkdirTemp("", "penstock-probe-")
			if err != nil {
				return fabricResult{}, err
			}
			defer os.RemoveAll(dir)
			listen = filepath.Join(dir, "shm.sock")
		}
		far, err := p.open(ctx, listen, token)
		if err != nil {
			return fabricResult{}, err
		}
		defer func() { err = errors.Join(err, far.Close()) }()
		a, err := roundtrip.NewAnswerer(far, far.memory.Bytes())
		if err != nil {
			return fabricResult{}, err
		}
		defer func() { err = errors.Join(err, closeAnswerer(ctx, a)) }()
		to = far.Addr()
	}
	near := nearEnds{p, w, to, token}
	r, err := near.measure(ctx)
	if err != nil || p.flows == 0 {
		return r, err
	}
	return r, near.load(ctx, &r)
}

// nearEnds makes the engines that send round trips to one far end. Each measurement needs a new
// engine, because roundtrip.Measure takes over the engine's receive buffers.
type nearEnds struct {
	fabricProbe
	w     world
	to    rdma.Addr
	token rdma.Token
}

// connect opens an engine, calls f, and closes the engine.
func (n nearEnds) connect(ctx context.Context, f func(e end, to rdma.EngineID) error) (err error) {
	e, err := n.open(ctx, "", n.token)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	id, err := e.Connect(ctx, n.to, n.token)
	if err != nil {
		if strings.Contains(err.Error(), n.where()) {
			return err // the error names the peer
		}
		return fmt.Errorf("connect to %s: %w", n.where(), err)
	}
	return f(e, id)
}

// measure measures the round trips of all batches and fits the constants.
func (n nearEnds) measure(ctx context.Context) (r fabricResult, err error) {
	err = n.connect(ctx, func(e end, to rdma.EngineID) error {
		r, err = n.fabricProbe.measure(ctx, n.w, e, to)
		return err
	})
	return r, err
}

// load repeats the measurement while one, two, … other engines send round trips to the same far end
// (flows), and fits the contention.
func (n nearEnds) load(ctx context.Context, r *fabricResult) error {
	others, stop := context.WithCancel(ctx)
	g, others := errgroup.WithContext(others)
	defer stop()
	payload := redistribute.DeepSeekV2Lite()
	most := slices.Max(n.rows)
	flow := roundtrip.Options{Shapes: []roundtrip.Shape{{There: most * payload.Query, Back: most * payload.Partial}}, Repeats: math.MaxInt32}
	loaded := []redistribute.Fabric{r.Fabric}
	for k := range n.flows {
		started := make(chan struct{})
		flow := flow
		flow.Progress = func(done, _ int) {
			if done == 1 {
				close(started)
			}
		}
		g.Go(func() error {
			return n.connect(others, func(e end, to rdma.EngineID) error {
				_, err := roundtrip.Measure(others, e, to, e.memory.Bytes(), flow)
				return err
			})
		})
		select {
		case <-started:
		case <-others.Done():
			return g.Wait()
		}
		beside, err := n.measure(ctx)
		if err != nil {
			return err
		}
		loaded = append(loaded, beside.Fabric)
		r.Beside = append(r.Beside, fabricLoad{Flows: k + 1, Signal: beside.Signal, Fabric: beside.Fabric, RoundTrip: beside.Fabric.RoundTrip(payload.RouteBytes(decodeRows, 1))})
	}
	stop()
	if err := g.Wait(); err != nil && ctx.Err() == nil && !errors.Is(err, context.Canceled) {
		return err
	}
	r.Fabric.Contention = redistribute.FitContention(payload, decodeRows, loaded)
	return ctx.Err()
}

// decodeRows is the batch size, in rows, of a decoding step; for this size the effect of concurrent
// flows is computed.
const decodeRows = 256

// where describes the far end.
func (p fabricProbe) where() string {
	if p.peer == "" {
		return "loopback"
	}
	return p.peer
}

// measure measures and fits the round trips. Shape 0 has no payload.
func (p fabricProbe) measure(ctx context.Context, w world, e end, to rdma.EngineID) (fabricResult, error) {
	payload := redistribute.DeepSeekV2Lite()
	shapes := []roundtrip.Shape{{}}
	for _, n := range p.rows {
		shapes = append(shapes, roundtrip.Shape{There: n * payload.Query, Back: n * payload.Partial})
	}
	progress := newProgress(w, "round trips of each batch", unitRequests)
	samples, err := roundtrip.Measure(ctx, e, to, e.memory.Bytes(), roundtrip.Options{
		Shapes: shapes, Warmup: p.warmup, Repeats: p.repeats,
		Progress: func(done, total int) { progress.set(int64(done), int64(total)) },
	})
	progress.finish()
	if err != nil {
		return fabricResult{}, err
	}
	r := fabricResult{Provider: p.provider, Peer: p.where(), Detail: e.Info().Detail}
	times := make([][]float64, len(shapes))
	var trips []redistribute.Sample
	for _, s := range samples {
		t := s.Took.Seconds()
		times[s.Shape] = append(times[s.Shape], t)
		if s.Shape > 0 {
			trips = append(trips, redistribute.Sample{Bytes: float64(shapes[s.Shape].Bytes()), Seconds: t})
		}
	}
	fit, err := redistribute.Calibrate(trips)
	if err != nil {
		return fabricResult{}, err
	}
	for _, t := range times {
		slices.Sort(t)
	}
	r.Signal = quantileOf(times[0], 0.5)
	name := p.name
	if name == "" {
		name = p.provider + " " + p.where()
	}
	r.Fabric = fit.Fabric(name, r.Signal)
	r.Samples, r.Outliers = fit.Samples, fit.Outliers
	r.judge(p.rows, times[1:], shapes[1:], fit)
	return r, nil
}

// quantileOf returns a quantile of sorted values.
func quantileOf(sorted []float64, q float64) float64 {
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// fabricResult is the output of the command.
type fabricResult struct {
	Provider string              `json:"provider"`
	Peer     string              `json:"peer"`
	Detail   string              `json:"detail"`
	Fabric   redistribute.Fabric `json:"fabric"`
	// Signal is the median round trip without payload.
	Signal float64 `json:"signal_seconds"`
	// MAPE is the mean absolute relative error of the fit over the medians of all batches (0.03 is
	// 3 %). Amortised is the same over the batches whose bytes take longer than the constant part
	// of a round trip, and null if there are none.
	MAPE      float64     `json:"mape"`
	Amortised *float64    `json:"mape_amortised"`
	Samples   int         `json:"samples"`
	Outliers  int         `json:"outliers"`
	Batches   []fabricRow `json:"batches"`
	// Beside has the measurements with concurrent flows, if --flows was given.
	Beside []fabricLoad `json:"beside,omitempty"`
}

// fabricLoad is a measurement while other engines send round trips (flows).
type fabricLoad struct {
	Flows  int                 `json:"flows"`
	Signal float64             `json:"signal_seconds"`
	Fabric redistribute.Fabric `json:"fabric"`
	// RoundTrip is the fitted time of a decoding step, in seconds.
	RoundTrip float64 `json:"decode_seconds"`
}

// fabricRow is one batch.
type fabricRow struct {
	Rows  int `json:"rows"`
	Bytes int `json:"bytes"`
	// Median and P99 are measured, Fit is the fitted value, all in seconds.
	Median float64 `json:"median_seconds"`
	P99    float64 `json:"p99_seconds"`
	Fit    float64 `json:"fit_seconds"`
	Error  float64 `json:"error"`
}

// judge computes the errors of the fit from the median of each batch. The paper compares means of
// 200 round trips.
func (r *fabricResult) judge(rows []int, times [][]float64, shapes []roundtrip.Shape, fit redistribute.Fit) {
	var all, large, n float64
	for i, t := range times {
		bytes := float64(shapes[i].Bytes())
		b := fabricRow{Rows: rows[i], Bytes: shapes[i].Bytes(), Median: quantileOf(t, 0.5), P99: quantileOf(t, 0.99), Fit: fit.Seconds(bytes)}
		b.Error = b.Fit/b.Median - 1
		r.Batches = append(r.Batches, b)
		all += math.Abs(b.Error)
		if bytes/fit.Bandwidth > fit.Intercept {
			large, n = large+math.Abs(b.Error), n+1
		}
	}
	r.MAPE = all / float64(len(times))
	r.Fabric.MAPE = 0
	if r.Amortised = some(large / n); r.Amortised != nil {
		r.Fabric.MAPE = *r.Amortised
	}
}

// print writes the result as a table.
func (r fabricResult) print(t *table) {
	t.row("rows", "bytes", "median", "p99", "fit", "error")
	t.row(0, size(0), spell(r.Signal), "", spell(r.Fabric.Probe), "")
	for _, b := range r.Batches {
		t.row(count(b.Rows), size(int64(b.Bytes)), spell(b.Median), spell(b.P99), spell(b.Fit), fmt.Sprintf("%+.0f %%", 100*b.Error))
	}
	t.row()
	t.row("fabric", fmt.Sprintf("%s (%s)", r.Fabric.Name, r.Detail))
	t.row("probe", spell(r.Fabric.Probe))
	t.row("turnaround", spell(r.Fabric.Turnaround))
	t.row("bandwidth", fmt.Sprintf("%.3g GB/s", r.Fabric.Bandwidth/1e9))
	mape := fmt.Sprintf("%.0f %% over all batches", 100*r.MAPE)
	if r.Amortised != nil {
		mape += fmt.Sprintf(", %.0f %% where bytes take longer than the rest", 100**r.Amortised)
	}
	t.row("MAPE of the fit", mape)
	t.row("round trips", fmt.Sprintf("%s, %s of them too far off to count", count(r.Samples), count(r.Outliers)))
	if len(r.Beside) == 0 {
		return
	}
	t.row()
	t.row("other flows", "signal", "256 rows", "bandwidth")
	t.row(0, spell(r.Signal), spell(r.Fabric.RoundTrip(redistribute.DeepSeekV2Lite().RouteBytes(decodeRows, 1))), fmt.Sprintf("%.3g GB/s", r.Fabric.Bandwidth/1e9))
	for _, b := range r.Beside {
		t.row(b.Flows, spell(b.Signal), spell(b.RoundTrip), fmt.Sprintf("%.3g GB/s", b.Fabric.Bandwidth/1e9))
	}
	if c := r.Fabric.Contention; c == (redistribute.Contention{}) {
		t.row("full", "not with so many")
	} else {
		t.row("full", fmt.Sprintf("beside %d: the probe takes %.2f times as long, a byte %.2f times", c.Free+1, c.Probe, c.Transfer))
	}
}

// writeFabric saves the constants in a file.
func writeFabric(path string, f redistribute.Fabric) error {
	b, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}
