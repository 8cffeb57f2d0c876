#!/usr/bin/env python3
# A client written from proto/lode/v1/lode.proto alone, in another language, against a real stack. Prints an answer.
# Called by ctest as: grpc_client_test.py BIN_DIR GENERATED_DIR
import sys
import threading
import unittest

BIN, GENERATED = sys.argv[1:3]
sys.path.insert(0, GENERATED)

import grpc  # noqa: E402
from lode.v1 import lode_pb2 as pb  # noqa: E402
from lode.v1 import lode_pb2_grpc  # noqa: E402

from stack import Stack, wait_for  # noqa: E402

CALL_SECONDS = 120
PROMPT = "Write a Python function is_even that returns True if the number is even."


class GrpcClient(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stack = Stack(BIN)
        cls.stack.wait_ready()
        cls.channel = grpc.insecure_channel("unix:" + cls.stack.socket)
        cls.stub = lode_pb2_grpc.LodeServiceStub(cls.channel)

    @classmethod
    def tearDownClass(cls):
        cls.channel.close()
        cls.stack.stop()

    def health(self, service=b""):
        check = self.channel.unary_unary("/grpc.health.v1.Health/Check", request_serializer=bytes, response_deserializer=bytes)
        return check(b"\x0a" + bytes([len(service)]) + service if service else b"", timeout=CALL_SECONDS)

    def generate(self, text="def is_even(", n=24, **limits):
        request = pb.GenerateRequest(text=text, sampling=pb.Sampling(temperature=0, seed=1),
                                     limits=pb.Limits(max_tokens=n, hash_logits=True, ignore_end=True, **limits))
        answer, finish = "", None
        for message in self.stub.Generate(request, timeout=CALL_SECONDS):
            self.assertIsNone(finish, "nothing follows the last message")
            if message.HasField("delta"):
                answer += message.delta.text
            elif message.HasField("finish"):
                finish = message.finish
        self.assertIsNotNone(finish)
        return answer, finish

    def test_health(self):
        self.assertEqual(self.health(), b"\x08\x01")  # status = SERVING
        self.assertEqual(self.health(b"lode.v1.LodeService"), b"\x08\x01")

    def test_list_models(self):
        models = self.stub.ListModels(pb.ListModelsRequest(), timeout=CALL_SECONDS).models
        self.assertEqual(len(models), 1)
        self.assertEqual(models[0].id, "demo-q4-with-mtp")
        self.assertEqual(models[0].architecture, "qwen4exp")
        self.assertGreater(models[0].experts, models[0].experts_used)
        self.assertGreater(models[0].context, 0)

    def test_status(self):
        status = self.stub.Status(pb.StatusRequest(), timeout=CALL_SECONDS)
        self.assertEqual(status.state, "ready")
        self.assertEqual(sorted(w.name for w in status.workers), ["cpu0", "cpu1", "gpu0"])
        self.assertTrue(all(w.pid > 0 and w.state == "ready" for w in status.workers))
        self.assertEqual(status.model, "demo-q4-with-mtp")
        self.assertTrue(status.version)

    def test_tokenize_round_trip(self):
        text = "def f(x):\n    return x % 2 == 0  # größer, 偶数 🙂"
        tokens = self.stub.Tokenize(pb.TokenizeRequest(text=text, raw_text=True), timeout=CALL_SECONDS)
        self.assertEqual(len(tokens.ids), len(tokens.pieces))
        back = self.stub.Detokenize(pb.DetokenizeRequest(ids=tokens.ids), timeout=CALL_SECONDS)
        self.assertEqual(back.text, text)

    def test_generate(self):
        answer, finish = self.generate()
        self.assertEqual(finish.reason, pb.FINISH_REASON_LENGTH)
        self.assertEqual(finish.usage.completion_tokens, 24)
        self.assertGreater(finish.usage.prompt_tokens, 0)
        self.assertGreater(finish.usage.timing.windows, 0)
        self.assertGreater(sum(finish.usage.timing.lane_lookups.values()), 0)
        self.assertTrue(answer)
        print(f"\nGenerate: def is_even({answer}\n{finish.usage.completion_tokens} tokens, hit_rate {finish.usage.hit_rate:.3f}")

    def test_same_answer_alone_and_in_company(self):
        alone, first = self.generate()
        others = [threading.Thread(target=self.generate, args=(f"number {i} is", 16)) for i in range(3)]
        for other in others:
            other.start()
        together, second = self.generate()
        for other in others:
            other.join()
        self.assertEqual(alone, together)
        self.assertNotEqual(first.logits_hash, 0)
        self.assertEqual(first.logits_hash, second.logits_hash)

    def test_chat(self):
        request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content=PROMPT)], sampling=pb.Sampling(temperature=0),
                                 limits=pb.Limits(max_tokens=64), template_options_json={"enable_thinking": "false"})
        messages = list(self.stub.Chat(request, timeout=CALL_SECONDS))
        answer = "".join(m.delta.text for m in messages)
        self.assertTrue(messages[-1].HasField("finish"))
        self.assertIn(messages[-1].finish.reason, (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH))
        self.assertTrue(answer.strip())
        print(f"\nChat: {PROMPT}\n{answer}")

    def test_stop_string_ends_the_answer_before_it(self):
        whole, _ = self.generate(n=24)
        stop = whole[len(whole) // 2:len(whole) // 2 + 3]
        answer, finish = self.generate(n=24, stop=[stop])
        self.assertEqual(finish.reason, pb.FINISH_REASON_STOP)
        self.assertEqual(finish.stop_string, stop)
        self.assertEqual(answer, whole[:whole.index(stop)])

    def test_prompt_logprobs(self):
        ids = self.stub.Tokenize(pb.TokenizeRequest(text="def f(x): return x"), timeout=CALL_SECONDS).ids
        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=ids), limits=pb.Limits(max_tokens=0, prompt_logprobs=True))
        messages = list(self.stub.Generate(request, timeout=CALL_SECONDS))
        self.assertTrue(messages[0].HasField("prompt"))
        self.assertEqual([t.id for t in messages[0].prompt.tokens], list(ids))
        self.assertEqual(len(messages[0].prompt.argmax), len(ids))
        self.assertTrue(all(t.logprob <= 0 for t in messages[0].prompt.tokens[1:]))

    def test_cancel_frees_the_slot(self):
        request = pb.GenerateRequest(text="a", limits=pb.Limits(max_tokens=2000, ignore_end=True))
        stream = self.stub.Generate(request, timeout=CALL_SECONDS)
        next(stream)
        stream.cancel()
        with self.assertRaises(grpc.RpcError):
            list(stream)
        wait_for("the end of the cancelled sequence", 30,
                 lambda: self.stub.Status(pb.StatusRequest(), timeout=CALL_SECONDS).running == 0)

    def test_malformed_requests_and_the_service_goes_on(self):
        cases = [
            (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.GenerateRequest(text=""), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.GenerateRequest(tokens=pb.TokenIds(ids=[-1])), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.GenerateRequest(text="a", sampling=pb.Sampling(temperature=float("nan"))), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.GenerateRequest(text="a", sampling=pb.Sampling(min_p=1)), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.GenerateRequest(text="a", limits=pb.Limits(max_tokens=2**32 - 1)), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.GenerateRequest(text="a", limits=pb.Limits(stop=[""])), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.GenerateRequest(text="a", model="other"), grpc.StatusCode.NOT_FOUND),
        ]
        for request, code in cases:
            with self.assertRaises(grpc.RpcError) as caught:
                list(self.stub.Generate(request, timeout=CALL_SECONDS))
            self.assertEqual(caught.exception.code(), code, caught.exception.details())
            self.assertTrue(caught.exception.details())
        # Bytes that are no message at all.
        raw = self.channel.unary_stream("/lode.v1.LodeService/Generate", request_serializer=bytes, response_deserializer=bytes)
        with self.assertRaises(grpc.RpcError):
            list(raw(b"\xff\xff\xff", timeout=CALL_SECONDS))
        with self.assertRaises(grpc.RpcError) as caught:
            unknown = self.channel.unary_unary("/lode.v1.LodeService/NoSuch", request_serializer=bytes, response_deserializer=bytes)
            unknown(b"", timeout=CALL_SECONDS)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)
        self.generate(n=2)

    def test_tcp_serves_too(self):
        with grpc.insecure_channel(self.stack.tcp) as channel:
            status = lode_pb2_grpc.LodeServiceStub(channel).Status(pb.StatusRequest(), timeout=CALL_SECONDS)
        self.assertEqual(status.state, "ready")


unittest.main(argv=sys.argv[:1], verbosity=2)
