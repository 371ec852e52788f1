package front

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"slices"
	"testing"

	"google.golang.org/grpc"

	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/kv"
)

// TestSalts: the front computes the salts of cache_salt as the vLLM connector does. The connector's
// test (python/tests/test_vllm_dualpath.py) has the same vectors.
func TestSalts(t *testing.T) {
	text, err := os.ReadFile("testdata/cache_salts.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct{ Salt, First, Second string }
	if err := json.Unmarshal(text, &vectors); err != nil {
		t.Fatal(err)
	}
	if len(vectors) < 7 {
		t.Fatalf("%d vectors", len(vectors))
	}
	for _, v := range vectors {
		salt, err := json.Marshal(v.Salt)
		if err != nil {
			t.Fatal(err)
		}
		f, err := parseFields(fmt.Appendf(nil, `{"cache_salt": %s}`, salt))
		if err != nil {
			t.Fatal(err)
		}
		got, err := saltsOf(f, "", nil, geo.BlockTokens)
		if err != nil || len(got) != 2 || got[0].Block != 0 || got[1].Block != 1 || string(got[0].Extra) != v.First || string(got[1].Extra) != v.Second {
			t.Errorf("%q: %+v, %v; want %q and %q", v.Salt, got, err, v.First, v.Second)
		}
	}
}

// TestAdapterSalts: the front computes the salts of an adapter's blocks as the vLLM connector does, from the
// connector's identity of the adapter. The connector's test has the same vectors.
func TestAdapterSalts(t *testing.T) {
	text, err := os.ReadFile("testdata/adapter_salts.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct{ Identity, Salt, First, Second string }
	if err := json.Unmarshal(text, &vectors); err != nil {
		t.Fatal(err)
	}
	if len(vectors) < 2 {
		t.Fatalf("%d vectors", len(vectors))
	}
	for _, v := range vectors {
		want := []gateway.Salt{{Block: 0, Extra: []byte(v.First)}}
		var f fields
		if v.Salt != "" {
			want = append(want, gateway.Salt{Block: 1, Extra: []byte(v.Second)})
			if f, err = parseFields(fmt.Appendf(nil, `{"cache_salt": %q}`, v.Salt)); err != nil {
				t.Fatal(err)
			}
		}
		got, err := saltsOf(f, v.Identity, nil, geo.BlockTokens)
		same := func(a, b gateway.Salt) bool { return a.Block == b.Block && string(a.Extra) == string(b.Extra) }
		if err != nil || !slices.EqualFunc(got, want, same) {
			t.Errorf("%q: %v, %v; want %v", v.Salt, got, err, want)
		}
	}
}

// TestImageSalts: a gateway with the front's salts computes the ids of prompts with images as the vLLM
// connector does, also with an adapter and a cache salt. The connector's test
// (python/engines/test_vllm_dualpath.py) has the same vectors.
func TestImageSalts(t *testing.T) {
	text, err := os.ReadFile("testdata/image_salts.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Name, Salt, Identity string
		Tokens               int
		Images               []struct {
			Hash           string
			Offset, Length int
		}
		IDs []string
	}
	if err := json.Unmarshal(text, &vectors); err != nil {
		t.Fatal(err)
	}
	if len(vectors) < 15 {
		t.Fatalf("%d vectors", len(vectors))
	}
	ns := kv.Namespace{Name: "images", Geometry: kv.SingleGroup(1, 4, 8)}
	session, err := gateway.New(gateway.Options{Namespace: ns, Store: struct{ gateway.Storage }{}, Planner: struct{ grpc.ClientConnInterface }{}})
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors {
		var f fields
		if v.Salt != "" {
			salt, err := json.Marshal(v.Salt)
			if err != nil {
				t.Fatal(err)
			}
			if f, err = parseFields(fmt.Appendf(nil, `{"cache_salt": %s}`, salt)); err != nil {
				t.Fatal(err)
			}
		}
		var images []image
		for _, one := range v.Images {
			images = append(images, image{one.Hash, one.Offset, one.Length})
		}
		salts, err := saltsOf(f, v.Identity, images, session.BlockTokens())
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
			continue
		}
		tokens := make([]kv.Token, v.Tokens)
		for i := range tokens {
			tokens[i] = kv.Token(i)
		}
		r, err := session.Prepare(gateway.Request{ID: "r", Tokens: tokens, Salts: salts})
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
			continue
		}
		var ids []string
		for _, id := range r.IDs {
			ids = append(ids, hex.EncodeToString(id[:]))
		}
		if !slices.Equal(ids, v.IDs) {
			t.Errorf("%s: the salts are %v and the ids %v; want %v", v.Name, salts, ids, v.IDs)
		}
	}
}

// TestPlannedSalt: the engines get the ids of the salted chain.
func TestPlannedSalt(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	chain, err := c.ns.Chain()
	c.must(err)
	prompt := make([]kv.Token, 3*geo.BlockTokens)
	words, err := json.Marshal(prompt)
	c.must(err)
	plain := chain
	without, _ := plain.Append(nil, prompt)
	salted := chain.Salt([]byte("(None,(('cache_salt','tenant 7')))"))
	with, _ := salted.Append(nil, prompt[:geo.BlockTokens])
	salted = salted.Salt([]byte("None"))
	with, _ = salted.Append(with, prompt[geo.BlockTokens:])
	for salt, want := range map[string][]kv.BlockID{``: without, `,"cache_salt":null`: without, `,"cache_salt":"tenant 7"`: with} {
		got := make(chan *leader.Request, 1)
		good := *c.d.work.Load()
		c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
			got <- q
			good(w, r, q)
		})
		resp, text, err := c.call(t.Context(), "/v1/completions", `{"prompt":`+string(words)+salt+`}`)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%v, %s, %v", resp, text, err)
		}
		load, err := gateway.ParsePayload(receive(t, got).Payload)
		c.must(err)
		if !slices.Equal(load.IDs, want) {
			t.Errorf("%s: the engines have %x; want %x", salt, load.IDs, want)
		}
		c.d.does(good)
	}
}
