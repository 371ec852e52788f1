package console

import (
	"bytes"
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
)

// Access decides which pages and namespaces the caller of a request may see. Its methods may be called concurrently.
type Access interface {
	// Admit returns an error if the caller may not make the request. The context that it returns
	// carries the caller's identity. It is called before each event of a stream.
	Admit(*http.Request) (context.Context, error)
	// Caller returns the name by which the streams of a caller are counted. "" is a caller without a
	// name, whose streams are only in the count of all.
	Caller(context.Context) string
	// Opens reports whether the caller may open the page at a path.
	Opens(ctx context.Context, path string) bool
	// SeesNamespace reports whether the caller may see a namespace.
	SeesNamespace(ctx context.Context, name string) bool
	// SeesTenant reports whether the caller may see the tenant whose namespaces begin with a prefix.
	SeesTenant(ctx context.Context, prefix string) bool
	// SeesPins reports whether the caller may see the pins of a namespace.
	SeesPins(ctx context.Context, name string) bool
}

// Options are the options of a Console. Access and one of Source and Planner are required.
type Options struct {
	// Source makes a console of a node, Planner one of a planner.
	Source  Source
	Planner PlannerSource
	Access  Access
	// Node is the name of the node or of the planner.
	Node string
	// Interval is the time between two events of a stream. Default: 2 s.
	Interval time.Duration
	// WriteTimeout is the time that a client may take to read an event. Default: 10 s.
	WriteTimeout time.Duration
	// Streams is the maximum number of streams. Default: 32.
	Streams int
	// StreamsPerCaller is the maximum number of streams of one caller with a name. Default: 8.
	StreamsPerCaller int
	Now              func() time.Time
}

// Console serves the pages.
type Console struct {
	opts       Options
	pages      []*page
	overview   feed[Overview]
	namespaces feed[[]Namespace]
	tenants    feed[[]Tenant]
	prefixes   feed[Prefixes]
	pins       func(ctx context.Context, sees func(namespace string) bool, rows int) Pins
	actions    feed[[]Action]
	dualPath   feed[DualPath]
	requests   feed[Requests]

	done chan struct{} // closed by Stop

	mu      sync.Mutex
	stopped bool
	running int
	// callers has the number of running streams of each caller with a name.
	callers map[string]int
	// ended waits for running streams. Streams begin only while stopped is false.
	ended sync.WaitGroup
}

// page is one page. Its live part is the template "live" of its file, and its controls, which stay as
// they are, are the template "controls".
type page struct {
	path, live, title string
	template          *template.Template
	// view returns the data of the templates, and the summary.
	view func(ctx context.Context, query url.Values) (data any, summary string)
}

//go:embed web
var files embed.FS

// policy is the Content-Security-Policy of every response.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// New returns a Console.
func New(opts Options) *Console {
	opts.Interval = cmp.Or(opts.Interval, 2*time.Second)
	opts.WriteTimeout = cmp.Or(opts.WriteTimeout, 10*time.Second)
	opts.Streams = cmp.Or(opts.Streams, 32)
	opts.StreamsPerCaller = cmp.Or(opts.StreamsPerCaller, 8)
	if opts.Now == nil {
		opts.Now = time.Now
	}
	c := &Console{opts: opts, done: make(chan struct{}), callers: make(map[string]int)}
	if opts.Planner != nil {
		c.pages = c.plannerPages()
	} else {
		c.pages = c.nodePages()
	}
	layout := template.Must(template.New("layout.html").Funcs(functions).ParseFS(files, "web/layout.html"))
	for _, p := range c.pages {
		file := strings.TrimPrefix(p.live, "/live/") + ".html"
		p.template = template.Must(template.Must(layout.Clone()).ParseFS(files, "web/"+file))
	}
	return c
}

// nodePages are the pages of a node.
func (c *Console) nodePages() []*page {
	src := c.opts.Source
	c.overview.load = src.Overview
	c.namespaces.load = src.Namespaces
	c.tenants.load = src.Tenants
	c.prefixes.load = src.Prefixes
	c.pins = src.Pins
	c.actions.load = src.Actions
	return []*page{
		{path: "/", live: "/live/overview", title: "Overview", view: c.viewOverview},
		{path: "/namespaces", live: "/live/namespaces", title: "Namespaces", view: c.viewNamespaces},
		{path: "/prefixes", live: "/live/prefixes", title: "Prefixes", view: c.viewPrefixes},
		{path: "/pins", live: "/live/pins", title: "Pins", view: c.viewPins},
		{path: "/actions", live: "/live/actions", title: "Recent actions", view: c.viewActions},
	}
}

// plannerPages are the pages of a planner.
func (c *Console) plannerPages() []*page {
	src := c.opts.Planner
	c.dualPath.load = src.DualPath
	c.requests.load = src.Requests
	return []*page{
		{path: "/", live: "/live/dualpath", title: "Dual path", view: c.viewDualPath},
		{path: "/requests", live: "/live/requests", title: "Requests", view: c.viewRequests},
	}
}

// Mux is the multiplexer to which Register adds handlers. *http.ServeMux implements it.
type Mux interface {
	HandleFunc(pattern string, h func(http.ResponseWriter, *http.Request))
}

// Register adds the pages, their streams and the static files to mux.
func (c *Console) Register(mux Mux) {
	for _, p := range c.pages {
		pattern := p.path
		if pattern == "/" {
			pattern = "/{$}"
		}
		mux.HandleFunc("GET "+pattern, c.page(p))
		mux.HandleFunc("GET "+p.live, c.stream(p))
	}
	for name, kind := range map[string]string{"style.css": "text/css", "live.js": "text/javascript", "icon.svg": "image/svg+xml"} {
		content, err := files.ReadFile("web/" + name)
		if err != nil {
			panic(err) // the file is not embedded
		}
		mux.HandleFunc("GET /console/"+name, func(w http.ResponseWriter, _ *http.Request) {
			setHeaders(w, kind+"; charset=utf-8")
			_, _ = w.Write(content) // an error means that the caller has disconnected
		})
	}
}

func setHeaders(w http.ResponseWriter, kind string) {
	h := w.Header()
	h.Set("Content-Type", kind)
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
}

// link is a link of the navigation.
type link struct {
	Path, Title string
	Current     bool
}

// frame is the data of the layout.
type frame struct {
	Node, Title, Summary, Live string
	Links                      []link
	View                       any
}

// page serves a whole page.
func (c *Console) page(p *page) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, query := r.Context(), r.URL.Query()
		view, summary := p.view(ctx, query)
		f := frame{Node: c.opts.Node, Title: p.title, Summary: summary, Live: (&url.URL{Path: p.live, RawQuery: query.Encode()}).String(), View: view}
		for _, other := range c.pages {
			if c.opts.Access.Opens(ctx, other.path) {
				f.Links = append(f.Links, link{Path: other.path, Title: other.title, Current: other == p})
			}
		}
		var out bytes.Buffer
		if err := p.template.Execute(&out, f); err != nil {
			http.Error(w, "the page cannot be rendered: "+err.Error(), http.StatusInternalServerError)
			return
		}
		setHeaders(w, "text/html; charset=utf-8")
		_, _ = out.WriteTo(w) // an error means that the caller has disconnected
	}
}

// stream serves the events of a page until the client disconnects, reads too slowly or loses its
// role, or Stop is called.
func (c *Console) stream(p *page) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		caller := c.opts.Access.Caller(r.Context())
		if err := c.begin(caller); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		defer c.end(caller)
		setHeaders(w, "text/event-stream")
		w.Header().Set("Connection", "close") // the deadline of the last event stays on the connection
		control := http.NewResponseController(w)
		ticks := time.NewTicker(c.opts.Interval)
		defer ticks.Stop()
		var live, summary string // as sent last
		for {
			ctx, err := c.opts.Access.Admit(r)
			if err != nil {
				return
			}
			view, text := p.view(ctx, r.URL.Query())
			var part, out bytes.Buffer
			if err := p.template.ExecuteTemplate(&part, "live", view); err != nil {
				return
			}
			if html := part.String(); html != live {
				live = html
				writeEvent(&out, "live", html)
			}
			if text != summary {
				summary = text
				writeEvent(&out, "summary", text)
			}
			if out.Len() == 0 {
				out.WriteString(":\n\n") // a comment, which fails if the client has disappeared
			}
			if control.SetWriteDeadline(time.Now().Add(c.opts.WriteTimeout)) != nil {
				return
			}
			if _, err := out.WriteTo(w); err != nil || control.Flush() != nil {
				return
			}
			select {
			case <-ticks.C:
			case <-r.Context().Done():
				return
			case <-c.done:
				return
			}
		}
	}
}

// lineEnds are the ends of lines in an event stream. They are replaced by the one that writeEvent
// expects, so that a text cannot end an event and begin another.
var lineEnds = strings.NewReplacer("\r\n", "\n", "\r", "\n")

// writeEvent writes a server-sent event.
func writeEvent(out *bytes.Buffer, name, data string) {
	out.WriteString("event: " + name + "\n")
	for line := range strings.Lines(lineEnds.Replace(data)) {
		out.WriteString("data: " + strings.TrimSuffix(line, "\n") + "\n")
	}
	out.WriteString("\n")
}

// begin counts a stream of a caller, and returns an error if there may be no further one.
func (c *Console) begin(caller string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.stopped:
		return errors.New("the node stops")
	case c.running == c.opts.Streams:
		return fmt.Errorf("the console has %d streams, the maximum: close a page of the console", c.running)
	case caller != "" && c.callers[caller] == c.opts.StreamsPerCaller:
		return fmt.Errorf("%s has %d streams of the console, the maximum of one caller: close a page of the console", caller, c.opts.StreamsPerCaller)
	}
	c.running++
	if caller != "" {
		c.callers[caller]++
	}
	c.ended.Add(1)
	return nil
}

// end ends the count of a stream that begin has counted.
func (c *Console) end(caller string) {
	c.mu.Lock()
	c.running--
	if c.callers[caller]--; c.callers[caller] <= 0 {
		delete(c.callers, caller)
	}
	c.mu.Unlock()
	c.ended.Done()
}

// Stop ends all streams, and refuses further ones. It does not wait for their end.
func (c *Console) Stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.stopped {
		c.stopped = true
		close(c.done)
	}
}

// Close is Stop, and waits for the end of the streams. A stream that writes ends after at most
// Options.WriteTimeout, or when its connection is closed.
func (c *Console) Close() {
	c.Stop()
	c.ended.Wait()
}

// feed keeps the last state, so that the number of callers does not multiply the work.
type feed[T any] struct {
	load func(context.Context) T

	mu    sync.Mutex
	at    time.Time // of state
	state T
}

// get returns the state of at most half an interval ago. A load does not end with ctx, because other
// callers get its result too.
func (f *feed[T]) get(ctx context.Context, now time.Time, interval time.Duration) T {
	f.mu.Lock()
	defer f.mu.Unlock()
	// The state may be a little younger than now, if another caller has loaded it since.
	if f.at.IsZero() || now.Sub(f.at).Abs() >= interval/2 {
		f.state = f.load(context.WithoutCancel(ctx))
		f.at = now
	}
	return f.state
}

// overviewView is the data of the templates of the overview.
type overviewView struct {
	Overview
	Faults []Fault
	// RemoteVolumes are rows of the volumes of other nodes, and RemoteVolumesAll is the number of all.
	RemoteVolumes    []remoteVolume
	RemoteVolumesAll int
}

func (c *Console) viewOverview(ctx context.Context, _ url.Values) (any, string) {
	o := c.overview.get(ctx, c.opts.Now(), c.opts.Interval)
	v := overviewView{Overview: o, Faults: o.Faults()}
	if o.Cluster != nil {
		v.RemoteVolumes, v.RemoteVolumesAll = o.Cluster.remoteVolumes(remoteVolumesShown)
	}
	return v, o.summary()
}
